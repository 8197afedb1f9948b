"""Ranks inside a container: the command that stands between a launcher and the ranks.

The job's script and its supervisor run outside, where the scheduler's programs are; the ranks, Ray and the training
inside. Both see the run directory and the working folder under the same names.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Literal

from fever.config import setting
from fever.errors import FeverError
from fever.launch.script_text import Argument, Option, ScriptSettings, quote_word, quote_words

SHARED = ["--network=host", "--ipc=host", "--pid=host", "--uts=host"]  # Ray's ports, /dev/shm, and the host's name


class Container(ScriptSettings):
    """The setting `container`; $VARIABLES in its texts are expanded on the job's first machine."""

    image: Argument = setting(..., "file or name of the image, as the runtime takes it")
    runtime: Literal["apptainer", "shifter", "podman-hpc"] = setting("apptainer", "the program that runs it")
    python: Argument = setting("python", "Python in the image, which has fever")
    mounts: tuple[Argument, ...] = setting((), "further folders to see inside, as PATH or PATH:PATH_INSIDE")
    options: tuple[Option, ...] = setting((), "further options of the runtime, such as --nv")

    def command(self, cwd: Path, run: Path) -> str:
        """The words before a rank's own command, quoted for the shell. `cwd`: where the job was submitted; `run`: its
        run directory."""
        image = quote_word(os.path.expanduser(self.image) if self.runtime == "apptainer" else self.image)
        options = " ".join(map(quote_words, self.options))
        words = {
            "apptainer": ["apptainer exec", *self._mounts("--bind", cwd, run), options, image],
            "shifter": ["shifter", f"--image={image}", *self._mounts("--volume"), options],
            "podman-hpc": [
                *["podman-hpc run --rm --env-host", *SHARED],
                *[*self._mounts("--volume", cwd, run), f"--workdir={quote(str(cwd))}", options, image],
            ],
        }
        return " ".join(filter(None, words[self.runtime]))

    def _mounts(self, option: str, *own: Path) -> list[str]:
        """Options that mount folders of the job, under their own names, and those of the settings."""
        for path in own:
            if {":", ","} & set(str(path)):
                raise FeverError(f"{path} cannot be mounted into a container; choose a folder without : and ,")
        ours = [f"{option}={quote(f'{path}:{path}')}" for path in dict.fromkeys(own)]
        theirs = [mount if ":" in mount else f"{mount}:{mount}" for mount in map(os.path.expanduser, self.mounts)]
        return [*ours, *(f"{option}={quote_word(mount)}" for mount in theirs)]
