"""Whether a run was made on this account. What it names, as `module:Name`, is imported only then, or with `--trust`.

A run made here has a file `signature`: the names that its configuration has, and a hash of them with a key that only
this user can read. A stranger can copy such a file, but cannot add a name to it. A run without such names has none. A
job's folder has one as well, written where the job was submitted: other machines have other keys. Trials are covered by
the signature of their search.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fever import layout
from fever.algos.registry import find_provider, without_prefix
from fever.config import RunConfig
from fever.errors import FeverError
from fever.files import open_regular, read_json, write_atomically
from fever.job import current_job, records

TRUST_HINT = "if you know who wrote it, add --trust (in Python: trust=True)"
# RLlib itself imports what some settings name: package.module.Name, a file of settings, or either with escapes.
DOTTED = re.compile(r"[.:]\s*[^\W\d]|\\")
SHOWN = 5  # names in a message
KEY_BYTES = 32


def names_in(config: RunConfig) -> list[str]:
    """Everything that this configuration may import by name: environment, algorithm, network, callbacks, and for
    another library's algorithm whatever it may take for a name. Raises `FeverError` for a search whose values cannot be
    read."""
    names = [without_prefix(config.algo), *config.names()]
    found = [name for name in names if ":" in name]
    if find_provider(config.algo) is not None:
        found += [text for text in config.texts() if DOTTED.search(text)]
    return list(dict.fromkeys(found))


def names_to_train(config: RunConfig) -> list[str]:
    """What must be allowed before training with this configuration: the names in it, its experiment trackers, which
    send with this user's login, and every text in the settings of another library's algorithm. One may be a folder
    of recorded episodes, and those can hold pickles."""
    more = config.texts() if find_provider(config.algo) is not None else []
    return list(dict.fromkeys([*names_in(config), *config.loggers, *more]))


def sign(folder: Path, config: RunConfig) -> None:
    """Record in a run directory, or in a job's folder, that this user has named what the configuration names.

    Where the key cannot be kept, because the home folder is read-only, there is no record: the run trains all the same.
    """
    names = names_to_train(config)
    if not names:
        return
    key = _key(make=True)
    if key is None:
        logging.warning("%s cannot be written: later commands ask for --trust before they use this run", records("key"))
    else:
        text = json.dumps({"names": names, "hmac": _hash(key, names)}, indent=2)
        write_atomically(folder / layout.SIGNATURE, text + "\n")


def accept(run: Path, config: RunConfig) -> None:
    """Sign a run whose names the user has just allowed, so that later commands do not ask again, if its folder is the
    user's own and can be written."""
    with suppress(OSError):
        own = run.stat().st_uid == os.geteuid() and os.access(run, os.W_OK)
        if own and not set(names_to_train(config)) <= _signed_names(run.resolve()):
            sign(run, config)


def require(run: Path, names: Iterable[str], trusted: bool) -> None:
    """Raise `FeverError` if a run is about to import something that nobody has allowed; `names` are the run's own, not
    what the user has named now. A job trusts the run that it was submitted with."""
    wanted = list(dict.fromkeys(names))
    if trusted or not wanted or current_job() is not None:
        return
    signed = _signed_names(run.resolve())
    if missing := [name for name in wanted if name not in signed]:
        more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        listed = " and ".join([*map(_printable, missing[:SHOWN]), *more])
        raise FeverError(
            f"{run} has no record that it was made on this account, and wants to import {listed}; {TRUST_HINT}"
        )


def _signed_names(run: Path) -> set[str]:
    """The names that this user has allowed in a run: by its own record, its job's, or those of the search it is in."""
    runs = [run, run.parent.parent] if run.parent.name == layout.TRIALS else [run]
    key = _key()
    if key is None:
        return set()
    return {name for one in runs for folder in (one, one / layout.JOB) for name in _read(folder, key)}


def _read(folder: Path, key: bytes) -> list[str]:
    """The names in a folder's signature; none if it is missing, damaged or somebody else's."""
    with suppress(FeverError, KeyError, TypeError):
        kept = read_json(folder / layout.SIGNATURE)
        names = [str(name) for name in kept["names"]]
        if hmac.compare_digest(_hash(key, names), kept["hmac"]):
            return names
    return []


def _hash(key: bytes, names: list[str]) -> str:
    return hmac.new(key, json.dumps(["fever", *names]).encode(), "sha256").hexdigest()


def _key(make: bool = False) -> bytes | None:
    """This user's secret key, made at its first use; None if there is none, it cannot be made, or somebody else may
    have put it there or know it: others may write or read it, or its owner is not that of its folder. Network file
    systems show other owners than this process has, but one for both."""
    path = records("key")
    with suppress(OSError):
        if make and not (path.exists() and path.stat().st_size == KEY_BYTES):  # a crash may have left an empty file
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path)
        with open_regular(path) as file:
            key, made = file.read(KEY_BYTES + 1), os.fstat(file.fileno())
        own = made.st_uid == path.parent.stat().st_uid and not made.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return key if own and len(key) == KEY_BYTES else None
    return None


def _create(path: Path) -> None:
    """Write a new key that appears whole. Of several processes, on several machines, the first one wins, unless the
    file system has no hard links: then the last one does."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        if path.exists() and path.stat().st_size != KEY_BYTES:
            path.unlink()
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _printable(name: str) -> str:
    """A name as it can be shown on a terminal: it may come from anyone."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:100])
