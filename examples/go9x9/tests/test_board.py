from __future__ import annotations

import numpy as np
import pytest

from fever_go.board import BLACK, WHITE, Board, move_of, vertex_of
from fever_go.env import random_move
from fever_go.gtp import Engine


def board_of(*rows: str, turn: int = BLACK, komi: float = 0.0, superko: bool = False) -> Board:
    """A position from text: X is black, O is white."""
    board = Board(len(rows), komi, superko)
    for index, sign in enumerate("".join(rows)):
        if sign in "XO":
            board.stones["XO".index(sign)] |= 1 << index
    board.turn = turn
    return board


def play(board: Board, *vertices: str) -> None:
    for vertex in vertices:
        board.play(move_of(vertex, board.size))


def legal(board: Board, vertex: str, color: int | None = None) -> bool:
    return bool(board.mask(color)[move_of(vertex, board.size)])


def stones(board: Board, color: int) -> set[str]:
    return {vertex_of(int(move), board.size) for move in np.flatnonzero(board.array(board.stones[color]))}


# By hand.


def test_a_group_without_liberties_is_taken_and_others_stay() -> None:
    board = board_of(".OOX.", ".XXO.", ".....", ".....", ".....")
    play(board, "A5")
    assert stones(board, WHITE) == {"D4"}
    assert stones(board, BLACK) == {"A5", "D5", "B4", "C4"}


def test_one_move_takes_groups_on_several_sides() -> None:
    board = board_of("XO.OX", ".XOX.", "..X..", ".....", ".....")
    play(board, "C5")
    assert stones(board, WHITE) == set()


def test_suicide_is_illegal_for_one_stone_and_for_a_group() -> None:
    one = board_of(".O...", "O....", ".....", ".....", ".....")
    group = board_of(".XO..", "OO...", ".....", ".....", ".....")
    for board in (one, group):
        assert not legal(board, "A5", BLACK)
        assert legal(board, "A5", WHITE)
        with pytest.raises(ValueError, match="move 0 is not legal"):
            play(board, "A5")


def test_a_move_without_liberties_that_takes_is_no_suicide() -> None:
    board = board_of(".OX..", "OX...", "X....", ".....", ".....")
    assert legal(board, "A5", BLACK)
    play(board, "A5")
    assert stones(board, WHITE) == set()


def ko(**arguments: bool) -> Board:
    """Black may take a ko at C4; white could take it back at B4."""
    return board_of(".XO..", "XO.O.", ".XO..", ".....", ".....", **arguments)


def test_a_ko_is_not_taken_back_at_once_but_after_a_move_elsewhere() -> None:
    board = ko()
    play(board, "C4")
    assert not legal(board, "B4")
    with pytest.raises(ValueError, match="not legal"):
        play(board, "B4")
    assert legal(board, "B4", BLACK)  # filling the ko is allowed
    play(board, "E1", "E2")
    assert legal(board, "B4")


def test_a_pass_lifts_a_ko() -> None:
    board = ko()
    play(board, "C4", "pass", "pass")
    assert legal(board, "B4")


def test_a_snapback_takes_more_than_one_stone_and_is_no_ko() -> None:
    board = board_of("O..XO", "OXXXO", ".OOO.", ".....", ".....", turn=WHITE)
    play(board, "C5", "B5")
    assert "C5" not in stones(board, WHITE)
    assert legal(board, "C5")
    play(board, "C5")
    assert stones(board, BLACK) == set()


def test_superko_forbids_what_simple_ko_allows() -> None:
    for superko in (False, True):
        board = ko(superko=superko)
        board._seen = {(board.stones[BLACK], board.stones[WHITE])}
        play(board, "C4", "pass", "pass")
        assert legal(board, "B4") is not superko


def test_two_passes_in_a_row_end_the_game() -> None:
    board = Board()
    play(board, "pass", "E5", "pass")
    assert not board.over
    play(board, "pass")
    assert board.over


@pytest.mark.parametrize(
    ("rows", "score"),
    [
        ((".....",) * 5, -0.5),
        (("....", ".X..", "....", "...."), 15.5),
        ((".XO.", ".XO.", ".XO.", ".XOO"), -0.5),
        ((".X.O", ".X.O", ".X.O", "XX.O"), 3.5),  # the column between belongs to neither
    ],
)
def test_area_counts_stones_and_what_only_they_reach(rows: tuple[str, ...], score: float) -> None:
    assert board_of(*rows, komi=0.5).score() == score


def test_eyes_are_seen_in_the_corner_at_the_edge_and_inside() -> None:
    board = board_of(".X..X.X", "XXX.XXX", "..X....", ".X.X...", "..XO...", "X......", ".XX....")
    assert np.flatnonzero(board.array(board.eyes(BLACK))).tolist() == [0, 5, 23, 42]
    false = board_of(".X...", "XO...", ".OXO.", ".X.X.", "..X..")
    assert np.flatnonzero(false.array(false.eyes(BLACK))).tolist() == []


@pytest.mark.parametrize(("move", "vertex"), [(0, "A9"), (8, "J9"), (40, "E5"), (72, "A1"), (80, "J1"), (81, "PASS")])
def test_moves_and_vertices(move: int, vertex: str) -> None:
    assert vertex_of(move, 9) == vertex
    assert move_of(vertex, 9) == move_of(vertex.lower(), 9) == move


@pytest.mark.parametrize("vertex", ["", "I5", "E10", "E0", "K3", "E", "nonsense"])
def test_what_is_not_on_the_board_is_no_move(vertex: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message depends on the mistake
        move_of(vertex, 9)


# Against GNU Go.


def answers(engine: Engine, command: str) -> set[str]:
    return set(engine.ask(command).split())


def same_as(engine: Engine, board: Board) -> None:
    """Stones and legal moves of both colors agree with the engine."""
    for color, name in enumerate(("black", "white")):
        assert stones(board, color) == answers(engine, f"list_stones {name}")
        mine = {vertex_of(int(move), board.size) for move in np.flatnonzero(board.mask(color)[:-1])}
        assert mine == answers(engine, f"all_legal {name}"), f"{name} to move, on\n{board}"


def random_game(
    engine: Engine, seed: int, size: int, superko: bool = False, fill_eyes: bool = True
) -> tuple[Board, int]:
    """Play at random, comparing every position. Returns the board, and in how many positions ko forbade a move."""
    board, random, forbidden = Board(size, superko=superko), np.random.default_rng(seed), 0
    engine.new_game(seed, size, board.komi)
    while not board.over and board.moves < 3 * size * size:
        choices = np.flatnonzero(board.mask()[:-1])
        move = int(random.choice(choices)) if fill_eyes and len(choices) else random_move(board, random)
        engine.play(board.turn, vertex_of(move, size))
        board.play(move)
        same_as(engine, board)
        forbidden += board.legal() != simple_legal(board) if superko else board.ko > 0
    return board, forbidden


def simple_legal(board: Board) -> int:
    board.superko = False
    legal = board.legal()
    board.superko = True
    return legal


@pytest.mark.parametrize("fill_eyes", [False, True])
@pytest.mark.parametrize(("size", "games"), [(5, 16), (9, 5)])
def test_random_games_are_the_same_as_in_gnugo(gnugo: Engine, size: int, games: int, fill_eyes: bool) -> None:
    kos = sum(random_game(gnugo, seed, size, fill_eyes=fill_eyes)[1] for seed in range(games))
    assert kos > 0, "these games test nothing about ko"


def test_random_games_with_superko_are_the_same_as_in_gnugo(gnugo: Engine) -> None:
    gnugo.command.append("--positional-superko")
    forbidden = sum(random_game(gnugo, seed, 5, superko=True)[1] for seed in range(12))
    assert forbidden > 0, "these games test nothing about superko"


def test_the_area_of_finished_games_is_the_final_score_of_gnugo(gnugo: Engine) -> None:
    """The games are played until only eyes are left, so that no stone is dead."""
    scores = []
    for seed in range(12):
        board, _ = random_game(gnugo, seed, 7, fill_eyes=False)
        assert board.over
        assert answers(gnugo, "final_status_list dead") == set()
        scores.append(board.score())
        assert gnugo.ask("final_score") == f"{'B' if scores[-1] > 0 else 'W'}+{abs(scores[-1])}"
    assert len(set(scores)) > 6
