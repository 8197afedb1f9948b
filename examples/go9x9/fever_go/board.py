"""The rules of Go, on sets of points that are the bits of one integer.

Point `row * size + column` is bit number `row * size + column`, row 0 at the top. A move is the number of a point, or
`size * size` for a pass. With sets as integers, "all neighbours of a group" is four shifts, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLACK, WHITE = 0, 1
COLUMNS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"  # without I, as engines have it


class Board:
    """A game from the empty board, black first: suicide is not allowed, and after two passes in a row it is over.

    Legality is by simple ko: a single stone that took a single stone may not be taken back at once. That is GNU Go's
    rule. With `superko=True` no move may bring back any earlier position (positional superko) either, which is what
    many other engines have.
    """

    def __init__(self, size: int = 9, komi: float = 7.5, superko: bool = False) -> None:
        self.size, self.komi, self.superko = size, komi, superko
        self.pass_move = size * size
        self.turn = BLACK
        self.moves = 0
        self.passes = 0  # in a row, up to now
        self.stones = [0, 0]  # points of black, points of white
        self.ko = 0  # the point that the player whose turn it is may not take back, as a set
        self._all = (1 << size * size) - 1
        self._left = sum(1 << row * size for row in range(size))
        self._right = self._left << size - 1
        top = (1 << size) - 1
        self._edge = self._left | self._right | top | top << size * (size - 1)
        self._seen = {(0, 0)}

    @property
    def empty(self) -> int:
        return self._all & ~self.stones[BLACK] & ~self.stones[WHITE]

    @property
    def over(self) -> bool:
        return self.passes >= 2

    def legal(self, color: int | None = None) -> int:
        """The points that a color, by default the one whose turn it is, may play on; a pass is always legal too."""
        color = self.turn if color is None else color
        empty = self.empty
        if self.superko:
            return sum(point for point in points(empty) if self._after(point, color) is not None)
        free = empty & self._neighbours(empty)  # a liberty of its own: neither suicide nor ko
        return free | sum(point for point in points(empty & ~free) if self._after(point, color) is not None)

    def mask(self, color: int | None = None) -> np.ndarray:
        """Legal moves as booleans [size * size + 1], the pass last."""
        return np.append(self.array(self.legal(color)), True)

    def play(self, move: int) -> None:
        """Play the move of the player whose turn it is; ValueError if it is not legal."""
        if move == self.pass_move:
            self.passes, self.ko = self.passes + 1, 0
        else:
            after = self._after(1 << move, self.turn) if 0 <= move < self.pass_move else None
            if after is None:
                raise ValueError(f"move {move} is not legal")
            captured = self.stones[1 - self.turn] & ~after[1 - self.turn]
            alone = not self._neighbours(1 << move) & (after[self.turn] | self.empty)
            self.ko = captured if alone and captured.bit_count() == 1 else 0
            self.passes, self.stones = 0, after
            self._seen.add((after[BLACK], after[WHITE]))
        self.turn, self.moves = 1 - self.turn, self.moves + 1

    def _after(self, point: int, color: int) -> list[int] | None:
        """The stones after a color's move on a point, or None if that is not legal."""
        if not point & self.empty or (point == self.ko and color == self.turn):
            return None
        own, other, empty = self.stones[color] | point, self.stones[1 - color], self.empty & ~point
        for stone in points(self._neighbours(point) & other):
            group = self._grow(stone, other)  # nothing for a stone that went with an earlier group
            if not self._neighbours(group) & empty:
                other &= ~group
        if other == self.stones[1 - color] and not self._neighbours(self._grow(point, own)) & empty:
            return None
        stones = [own, other] if color == BLACK else [other, own]
        return None if self.superko and tuple(stones) in self._seen else stones

    def score(self) -> float:
        """Black's points ahead of white's by area with all stones alive (Tromp-Taylor), komi counted."""
        black, white = (self._grow(stones, stones | self.empty) for stones in self.stones)
        return (black & ~white).bit_count() - (white & ~black).bit_count() - self.komi

    def eyes(self, color: int) -> int:
        """Points that look like a color's eyes: no neighbour is another's, and the diagonals can hardly be cut."""
        own, other = self.stones[color], self.stones[1 - color]
        found = 0
        for point in points(self.empty & ~self._neighbours(self._all & ~own)):
            row = point | self._sideways(point)
            diagonal = self._upright(row) & ~self._upright(point)
            cuts = (diagonal & other).bit_count()
            if cuts == 0 or (cuts == 1 and not point & self._edge):
                found |= point
        return found

    def array(self, points: int) -> np.ndarray:
        """A set of points as booleans [size * size]."""
        data = np.frombuffer(points.to_bytes((self.pass_move + 7) // 8, "little"), np.uint8)
        return np.unpackbits(data, count=self.pass_move, bitorder="little").astype(bool)

    def __str__(self) -> str:
        """The board as text: X is black, O is white, with the coordinates that engines use."""
        signs = np.full(self.pass_move, ".")
        signs[self.array(self.stones[BLACK])], signs[self.array(self.stones[WHITE])] = "X", "O"
        columns = "   " + " ".join(COLUMNS[: self.size])
        rows = [f"{self.size - row:2} {' '.join(line)}" for row, line in enumerate(signs.reshape(self.size, -1))]
        return "\n".join([columns, *rows])

    def _sideways(self, points: int) -> int:
        return (points & ~self._right) << 1 | (points & ~self._left) >> 1

    def _upright(self, points: int) -> int:
        return (points << self.size | points >> self.size) & self._all

    def _neighbours(self, points: int) -> int:
        """The points next to any of these; some of these can be among them."""
        return self._sideways(points) | self._upright(points)

    def _grow(self, seed: int, within: int) -> int:
        """All points of `within` that are connected to its points in `seed`."""
        group, seed = 0, seed & within
        while seed != group:
            group, seed = seed, (seed | self._neighbours(seed)) & within
        return group


def points(points: int) -> Iterator[int]:
    """The points of a set one by one, each as a set."""
    while points:
        point = points & -points
        yield point
        points ^= point


def vertex_of(move: int, size: int) -> str:
    """A move as engines write it: "A9" is point 0 of a board of 9, and "PASS" the number after the last point."""
    return "PASS" if move == size * size else f"{COLUMNS[move % size]}{size - move // size}"


def move_of(vertex: str, size: int) -> int:
    """A move from what an engine writes; ValueError for what is not on the board."""
    if vertex.upper() == "PASS":
        return size * size
    column, row = COLUMNS.index(vertex[:1].upper()), size - int(vertex[1:])
    if not (0 <= row < size and column < size):
        raise ValueError(f"{vertex} is not on a board of {size}")
    return row * size + column
