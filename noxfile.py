"""Everything that can be run in this repository, one session each; ``nox -l`` lists them.

Environments are made by uv. Three of its habits need care, and are handled at the top: it does not read pip's
settings, it prefers a CUDA build of torch from the package index, and ``uvx`` runs nox on the first Python it
finds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MEMBERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PROSE = ["packages", "tests", "examples", "benchmarks", "docs", "README.md", "CONTRIBUTING.md", "noxfile.py"]
SOURCES = [f"packages/{member}/src" for member in MEMBERS]

# The oldest Python of the members. A newer one that runs nox is used as it is.
OLDEST_PYTHON = (3, 11)
PYTHON = None if sys.version_info >= OLDEST_PYTHON else "3.11"

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True  # a missing Python is a failure, not a skipped session
nox.options.sessions = ["lint", "types", "layers", "tests"]

each_member = nox.parametrize("member", MEMBERS, ids=MEMBERS)


def prepare_environment(environment: dict[str, str]) -> dict[str, str]:
    """Say which variables sessions see beyond the caller's own.

    Returns:
        ``UV_FIND_LINKS`` where only pip's variable is set (pip separates by spaces, uv by commas), else
        ``UV_TORCH_BACKEND=auto`` where neither is set, so that a machine without a GPU gets a CPU build of
        torch. Never both: the backend would hide the linked files. Bytecode is kept, because sessions start
        hundreds of interpreters.
    """
    added = {"PYTHONDONTWRITEBYTECODE": ""}
    if "UV_FIND_LINKS" not in environment:
        if links := environment.get("PIP_FIND_LINKS", "").split():
            added["UV_FIND_LINKS"] = ",".join(links)
        else:
            added["UV_TORCH_BACKEND"] = environment.get("UV_TORCH_BACKEND", "auto")
    return added


os.environ.update(prepare_environment(dict(os.environ)))


def install(
    session: nox.Session, *members: str, groups: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> None:
    """Install ``members`` as editable, and dependency groups: ``"lint"``, ``"FILE:test"``."""
    editable = [argument for member in members for argument in ("-e", f"packages/{member}")]
    chosen = [argument for group in groups for argument in ("--group", group)]
    session.install(*options, *editable, *chosen)


def run_ranks(session: nox.Session, *command: str, **environment: str) -> None:
    """Run a command that starts ranks and ends them before itself; nox would kill it after half a second."""
    session.run(*command, env=environment, interrupt_timeout=30, terminate_timeout=10)


def install_deepspeed(session: nox.Session) -> None:
    """Install a peer of benchmarks, which is left out, and named in the table, where it does not install."""
    session.install("numpy", "packaging", "setuptools", "wheel")  # what building it needs
    without_kernels = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    session.install("--no-build-isolation", "deepspeed", env=without_kernels, success_codes=[0, 1])


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest, also where there are two cores and no numpy.

    One thread for each process, since a test starts up to eight ranks. torch complains when numpy is missing,
    which would be output of every subprocess.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    calm = {"OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
    run_ranks(session, "pytest", *arguments, **calm)


def test_groups(*members: str) -> tuple[str, ...]:
    """Name the group of each member that holds what its tests need."""
    return tuple(f"packages/{member}/pyproject.toml:test" for member in members)


@nox.session(python=PYTHON)
def quickstart(session: nox.Session) -> None:
    """Train a small GPT on two processes: -- [--nproc N] [--plan FILE] [--steps N] [...]."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nproc", default="2")
    chosen, rest = parser.parse_known_args(session.posargs)
    install(session, "core", "cli", groups=("quickstart",))
    calm = {} if sys.stdout.isatty() else {"TQDM_MININTERVAL": "5"}  # a log is no place for a moving bar
    run_ranks(session, "colossal", "run", "--nproc", chosen.nproc, "examples/train_gpt.py", *rest, **calm)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Test all members together, and what lies between them: -- [pytest's options].

    Two files at a time; ``-n 0`` leaves them to one process, for a debugger.
    """
    install(session, *MEMBERS, groups=("test", *test_groups(*MEMBERS)))
    run_tests(session, "-m", "not slow", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session(python=PYTHON)
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes: -- [pytest's options]."""
    install(session, *MEMBERS, groups=("test", *test_groups(*MEMBERS)))
    run_tests(session, "-m", "slow", *session.posargs)


@nox.session(python=PYTHON)
@each_member
def tests_alone(session: nox.Session, member: str) -> None:
    """Test one member in an environment that holds only what it declares: -- [pytest's options]."""
    install(session, member, groups=test_groups(member))
    run_tests(session, "-m", "not slow", f"packages/{member}/tests", *session.posargs)


@nox.session(python=PYTHON)
@each_member
def lowest(session: nox.Session, member: str) -> None:
    """Test one member on the oldest versions that it declares: -- [--keep torch] [pytest's options].

    Everything else is as tested. The floor of torch is a download of some size; --keep leaves one as tested.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", action="append", default=[])
    chosen, rest = parser.parse_known_args(session.posargs)
    declared = nox.project.load_toml(f"packages/{member}/pyproject.toml")["project"]["dependencies"]
    floors = dict(line.split(">=") for line in declared if not line.startswith("colossal-"))
    install(session, member, groups=test_groups(member))
    oldest = [f"{name}=={version}" for name, version in floors.items() if name not in chosen.keep]
    session.install("--no-config", *oldest)
    run_tests(session, "-m", "not slow", f"packages/{member}/tests", *rest)


@nox.session(python=PYTHON)
def coverage(session: nox.Session) -> None:
    """Measure which lines and branches the tests reach, ranks and subprocesses included."""
    install(session, *MEMBERS, groups=("coverage", *test_groups(*MEMBERS)))
    session.run("coverage", "erase")
    run_ranks(
        session, "coverage", "run", "-m", "pytest", "-m", "not slow", "--timeout", "120", *session.posargs
    )
    session.run("coverage", "combine")
    session.run("coverage", "report")


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check style, spelling, docstrings and metadata: -- --fix repairs what can be repaired."""
    install(session, groups=("lint",))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("codespell", *(["--write-changes"] if fix else []), *PROSE)
    session.run("interrogate", *SOURCES, *[f"packages/{member}/tests" for member in MEMBERS], "examples")
    session.run(
        "validate-pyproject",
        *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/pyproject.toml")),
    )


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Check types with mypy, member by member, since test folders share file names."""
    install(session, *MEMBERS, groups=("types", *test_groups(*MEMBERS)))
    for member in MEMBERS:
        folder = f"packages/{member}"
        session.run("mypy", f"{folder}/src", f"{folder}/tests", env={"MYPYPATH": f"{folder}/src:{folder}"})
    template = "examples/plugin-template"
    session.run(
        "mypy", f"{template}/src", f"{template}/tests", env={"MYPYPATH": f"{template}/src:{template}"}
    )
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py"), ROOT / "noxfile.py"]
    session.run("mypy", "tests", *sorted(str(script.relative_to(ROOT)) for script in scripts))


@nox.session(python=PYTHON)
def pyright(session: nox.Session) -> None:
    """Check types with pyright too: a second opinion, optional."""
    install(session, *MEMBERS, groups=("pyright", *test_groups(*MEMBERS)))
    session.run("pyright", *session.posargs)


@nox.session(python=PYTHON)
def layers(session: nox.Session) -> None:
    """Check the arrows between members and that nothing light reaches torch."""
    install(session, groups=("layers",))
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in SOURCES)})


@nox.session(python=PYTHON)
@each_member
def build(session: nox.Session, member: str) -> None:
    """Build sdist and wheel of one member into dist/, and look into the wheel."""
    target = Path(session.create_tmp()) / "dist"
    shutil.rmtree(target, ignore_errors=True)
    session.run("uv", "build", f"packages/{member}", "--out-dir", str(target), external=True)
    (wheel,) = target.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("py.typed", "licenses/LICENSE", "METADATA"):
        if not any(name.endswith(needed) for name in names):
            session.error(f"{wheel.name} holds no {needed}: {names}")
    session.log(f"{wheel.name}: {len(names)} files")


@nox.session(python=PYTHON)
def startup(session: nox.Session) -> None:
    """Time `colossal plugins list` on installed wheels with bytecode: -- [--limit-ms 150]."""
    target = Path(session.create_tmp()) / "dist"
    shutil.rmtree(target, ignore_errors=True)
    for member in MEMBERS:
        session.run("uv", "build", "--wheel", f"packages/{member}", "--out-dir", str(target), external=True)
    fresh = [option for member in MEMBERS for option in ("--reinstall-package", f"colossal-{member}")]
    session.install("--compile-bytecode", *fresh, *map(str, sorted(target.glob("*.whl"))))
    session.run("python", "benchmarks/startup.py", *session.posargs)


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Write the reference pages of docs/ from the docstrings: -- --check only says which are out of date."""
    install(session, "core")
    session.run("python", "docs/generate.py", *session.posargs)


@nox.session(python=PYTHON)
def bench_replicated(session: nox.Session) -> None:
    """Compare the step time and live bytes of `replicated` with torch's DDP: -- [--ranks 2 4] [...]."""
    install(session, "core", "cli")
    run_ranks(session, "python", "-m", "benchmarks.replicated", *session.posargs)


@nox.session(python=PYTHON)
def bench_tensor_parallel(session: nox.Session) -> None:
    """Compare the step time of `TensorParallel` with torch and transformers: -- [--ranks 2 4] [...]."""
    install(session, "core", "cli", "tensor-parallel", groups=("examples",))
    session.install("accelerate>=1.1")  # transformers loads nothing by a plan without it
    run_ranks(session, "python", "-m", "benchmarks.tensor_parallel", *session.posargs)


@nox.session(python=PYTHON)
def coverage_tensor_parallel(session: nox.Session) -> None:
    """Judge `TensorParallel` on every architecture of transformers, and write the table: -- [--only ...]."""
    install(session, "core", "tensor-parallel", "testkit", groups=("examples",))
    run_ranks(session, "python", "-m", "benchmarks.tensor_parallel_coverage", *session.posargs)


@nox.session(python=PYTHON)
def bench_zero(session: nox.Session) -> None:
    """Compare `zero1` to `zero3` with DDP, FSDP2 and DeepSpeed: -- [--ranks 2 4] [--sweep] [...]."""
    install(session, "core", "cli", "zero")
    install_deepspeed(session)
    run_ranks(session, "python", "-m", "benchmarks.zero", *session.posargs)


@nox.session(python=PYTHON)
def bench_gemini(session: nox.Session) -> None:
    """Measure `gemini` over its budget, beside its floor and peers with offload: -- [--ranks 1 2] [...]."""
    install(session, "core", "cli", "zero", "gemini")
    install_deepspeed(session)
    run_ranks(session, "python", "-m", "benchmarks.gemini", *session.posargs)


@nox.session(python=PYTHON)
def bench_pipeline(session: nox.Session) -> None:
    """Compare pipelines with torch.distributed.pipelining, zbv with 1f1b: -- [--ranks 2 4] [--self] [...]."""
    install(session, "core", "cli", "pipeline")
    run_ranks(session, "python", "-m", "benchmarks.pipeline", *session.posargs)


@nox.session(python=PYTHON)
@each_member
def changelog(session: nox.Session, member: str) -> None:
    """Show the next changelog entry of one member: -- --write VERSION puts it into CHANGELOG.md."""
    session.install("towncrier>=24.8")
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", metavar="VERSION")
    version = parser.parse_args(session.posargs).write
    mode = ["--version", version, "--yes"] if version else ["--version", "next", "--draft"]
    common = ["--config", "pyproject.toml", "--dir", f"packages/{member}", "--name", f"colossal-{member}"]
    session.run("towncrier", "build", *common, *mode)
