"""A machine made of stubs, on which the scripts of the repository run in a fraction of a second.

PATH holds the few tools that the scripts may use and Pythons that log what they are asked to run,
so a fresh machine, its installation included, costs nothing. The scripts are in a folder with a
space in its name.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "bash"
TOOLS = (
    "bash",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "env",
    "flock",
    "grep",
    "mkdir",
    "readlink",
    "sleep",
)

# Knows the modules named in the file beside it with the ending .has; logs what it runs.
STUB_PYTHON = """\
#!BASH
self=${BASH_SOURCE[0]}
if [[ $1 == -P ]]; then
    # The probe: -P -c PROGRAM MODULE...
    [[ -e $self.old ]] && exit 2
    shift 3
    for module in "$@"; do grep -qx "$module" "$self.has" || exit 1; done
    exit 0
elif [[ $1 == -V ]]; then
    echo "Python ${STUB_VERSION:-3.12.1}"
    exit 0
fi
{
    printf '%q ' "$self" "$PWD" "${OMP_NUM_THREADS:-}" "${HF_HUB_OFFLINE:-}" "${CI:-}" \\
        "${NNODES:-}" "${NODE_RANK:-}" "${RDZV_ENDPOINT:-}" "${HYPOTHESIS_PROFILE:-}" "$@"
    echo
} >>"$STUB_LOG"
case "$*" in
"-m venv --clear "*)
    mkdir -p "$4/bin"
    cp "$self" "$4/bin/python"
    printf '%s\\n' venv ensurepip ${STUB_NO_PIP:-pip} >"$4/bin/python.has"
    ;;
"-m ensurepip") echo pip >>"$self.has" ;;
"-m pip install"*) sleep "${STUB_PIP_TAKES:-0}" ;;
"-m pytest"*) cat >>"$STUB_LOG.stdin" ;;
esac
if [[ -n ${STUB_FAILS:-} && "$*" == *$STUB_FAILS* ]]; then exit "${STUB_CODE:-1}"; fi
"""

LOGGED = (
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "CI",
    "NNODES",
    "NODE_RANK",
    "RDZV_ENDPOINT",
    "HYPOTHESIS_PROFILE",
)
"""The variables that a stub Python logs, in its order."""


class Call(NamedTuple):
    """One thing that a stub Python was asked to run."""

    python: Path
    cwd: Path
    environment: dict[str, str]
    arguments: list[str]

    def flag(self, name: str) -> str:
        return self.arguments[self.arguments.index(name) + 1]


class Machine:
    """A checkout, a home folder to call from, and a PATH of stubs."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "a checkout"
        self.cwd = folder / "somewhere else"
        self.bin = folder / "bin"
        self.log = folder / "log"
        for made in (self.checkout, self.cwd, self.bin):
            made.mkdir(parents=True)
        for name in ("scripts", ".ci"):
            shutil.copytree(REPOSITORY / name, self.checkout / name)
        for name in ("run_train.sh", "run_tests.sh"):
            shutil.copy(REPOSITORY / name, self.checkout / name)
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        (self.checkout / "constraints.txt").write_text("torch==1\n")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def tool(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)

    def python(self, name: str, modules: list[str], *, old: bool = False) -> None:
        path = self.bin / name
        path.write_text(STUB_PYTHON.replace("BASH", BASH, 1))
        path.chmod(0o755)
        Path(f"{path}.has").write_text("\n".join(modules) + "\n")
        if old:
            Path(f"{path}.old").touch()

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.checkout / script, *arguments],
            cwd=self.cwd,
            env={"PATH": str(self.bin), "STUB_LOG": str(self.log), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(
        self, script: str, *arguments: str, expect: int = 0, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(stdin, timeout=30)
        assert process.returncode == expect, f"exit {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[Call]:
        """Everything run since last asked."""
        if not self.log.exists():
            return []
        calls = []
        for line in self.log.read_text().splitlines():
            python, cwd, *rest = shlex.split(line)
            environment = dict(zip(LOGGED, rest[: len(LOGGED)], strict=True))
            calls.append(Call(Path(python), Path(cwd), environment, rest[len(LOGGED) :]))
        self.log.unlink()
        return calls

    def installations(self) -> list[str]:
        """What pip was asked to install since last asked."""
        return [c.flag("-e") for c in self.calls() if c.arguments[:3] == ["-m", "pip", "install"]]
