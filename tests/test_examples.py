"""Every example runs: the programs in examples/, and the Python and the commands of README.md and docs/.

A block that cannot run here follows a line ``<!-- not run: reason -->``; its commands are parsed all the same.
"""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import vaerdict as vd
from annotate_toys import pair
from vaerdict.datasets import linear_gaussian
from vaerdict.optional import isolated

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LONG = {
    "digits.py",  # a minute: the same code runs at toy size as the snippet of the README
    "numpyro_guide.py",  # run by test_from_weights.py
}
PACKAGES = {"pyro_guide.py": "pyro", "sbi_posterior.py": "sbi"}
"""Programs that train with another library, which draws from the global random state and warns."""
PROGRAMS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in LONG]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Examples write into a temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_programs_run(path, capsys):
    """Those that know the exact answer are within five standard errors of it (false-alarm rate 6e-7 each)."""
    if "sklearn" in path.read_text():
        pytest.importorskip("sklearn")
    if path.name in PACKAGES:
        pytest.importorskip(PACKAGES[path.name])
    with isolated(0) if path.name in PACKAGES else torch.random.fork_rng():
        names = runpy.run_path(str(path), run_name="__main__")
    assert "OK" in capsys.readouterr().out
    if "exact" in names:
        answer, exact = names["answer"], names["exact"]
        assert (answer.verdict == vd.Verdict.OK).all()
        assert ((answer.value - exact).abs() <= 5 * answer.mcse.clamp_min(1e-3)).all()


def test_each_kind_of_model_has_a_short_program():
    lines = {path.name: len(path.read_text().splitlines()) for path in PROGRAMS if path.name.startswith("own_")}
    assert set(lines) == {f"own_{kind}.py" for kind in ("vae", "conditional", "prior", "hierarchy", "discrete")}
    assert max(lines.values()) <= 60


# ------------------------------------------------------------------------------------------------------- collecting
class CodeBlock(NamedTuple):
    """A fenced block of a page; `not_run` is the reason why it is only read."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str


_FENCE = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


def code_blocks(page: Path) -> Iterator[CodeBlock]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield CodeBlock(page, line, match["language"], match["code"], match["reason"] or "")


BLOCKS = [block for page in PAGES for block in code_blocks(page)]
PYTHON = [page for page in PAGES if any(b.page == page and b.language == "python" for b in BLOCKS)]


def shell_lines(block: CodeBlock) -> list[list[str]]:
    """The commands of a block as words, comments left out."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = [(block, words) for block in BLOCKS if block.language == "bash" for words in shell_lines(block)]


def identity(value: Any) -> str:
    return f"{value.page.name}:{value.line}" if isinstance(value, CodeBlock) else " ".join(value)[:60]


def test_blocks_have_a_language_and_few_are_not_run():
    assert {block.language for block in BLOCKS} == {"python", "bash"}
    assert sum(block.language == "python" for block in BLOCKS) >= 15
    assert [(b.page.name, b.language, b.not_run) for b in BLOCKS if b.not_run] == [
        ("models.md", "bash", "needs a saved model"),
        ("scale.md", "bash", "needs two GPUs"),
        ("scale.md", "bash", "needs a cluster"),
        ("start.md", "bash", "test_demo.py runs it"),
    ]


# -------------------------------------------------------------------------------------------------------- stand-ins
def cells() -> Any:
    """Counts of three cell types, of cases and controls of eight donors; some cells without a type."""
    ad, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    rng, n, genes = np.random.default_rng(0), 240, 60
    kind = np.array(["B", "CD14+ Mono", "Mono", None], dtype=object)[np.arange(n) % 4]
    rate = np.exp(rng.normal(1.0, 0.5, size=genes)) * np.exp(rng.normal(0, 0.2, size=(n, 1)))
    rate[:, :4] *= np.where(kind == "B", 4.0, 1.0)[:, None]
    donor = np.arange(n) // 4 % 8
    obs = {"cell_type": kind, "condition": np.where(donor < 4, "case", "control"), "donor": [f"d{i}" for i in donor]}
    return ad.AnnData(
        rng.poisson(rng.gamma(5.0, rate / 5.0)).astype(np.float32),
        obs=pd.DataFrame(obs, index=[f"c{i}" for i in range(n)]),
        var=pd.DataFrame(index=[f"g{i}" for i in range(genes)]),
    )


def paired() -> Any:
    """The same counts as of five patients, who gave a control and a treated sample each."""
    adata = cells()
    patient, treated = np.arange(adata.n_obs) % 5, np.arange(adata.n_obs) // 5 % 2
    adata.obs["condition"] = np.where(treated, "panobinostat", "ctrl")
    adata.obs["patient_id"] = [f"p{i}" for i in patient]
    adata.obs["sample_id"] = adata.obs["patient_id"] + adata.obs["condition"]
    adata.obs["age"], adata.obs["gender"] = 50.0 + patient**2, np.where(patient < 2, "f", "m")
    return adata


def scvi_model() -> Any:
    """A model fitted by scvi-tools, for two epochs."""
    scvi = pytest.importorskip("scvi")
    with isolated(0):
        adata = cells()
        scvi.model.SCVI.setup_anndata(adata)
        model = scvi.model.SCVI(adata)
        split = np.split(np.arange(adata.n_obs), [200])
        options = {"enable_progress_bar": False, "logger": False, "datasplitter_kwargs": {"external_indexing": split}}
        model.train(max_epochs=2, accelerator="cpu", **options)
    return model


def ppca() -> vd.models.PPCA:
    return vd.models.PPCA(linear_gaussian(0).weight, 1.0)


def two_classes(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(np.repeat([0.0, 4.0], n // 2)[:, None], 1.0, (n, 3))


STAND_INS: dict[str, Callable[[], Any]] = {
    "adata": cells,
    "scvi_model": scvi_model,
    "MyDecoder": lambda: ppca,
    "x_train": lambda: linear_gaussian(0).x_train[:300],
    "x_valid": lambda: linear_gaussian(0).x_train[300:400],
    "x_test": lambda: linear_gaussian(0).x_test[:20],
    "X": lambda: two_classes(200),
    "y": lambda: np.repeat([0, 1], 100),
    "X_new": lambda: two_classes(20),
}
"""Names that a reader brings along."""

LEIDEN = """sc.pp.neighbors(part)
sc.tl.leiden(part, flavor="igraph", n_iterations=2)"""

QUICK = {
    "vd.IWAE, vd.WW, vd.CHI]": "vd.IWAE, vd.WW, vd.CHI], settings=vd.Settings(n_particles=4, epochs=4)",
    "SelectiveClassifier(": "SelectiveClassifier(epochs=2, proposals=(), n_draws=50, ",
    "X[1200:]": "X[1200:1220]",
    "splits=20, spikes=10": "splits=2, spikes=1, n_draws=50",
    LEIDEN: "from sklearn.cluster import KMeans\n"
    "part.obs['leiden'] = KMeans(3, random_state=0).fit_predict(part.obsm['X_pca']).astype(str)",
}
"""Parts of snippets, and what makes them quick."""


def quickened(code: str) -> str:
    for old, new in QUICK.items():
        code = code.replace(old, new)
    return code


def test_every_stand_in_and_replacement_is_used():
    code = "\n".join(block.code for block in BLOCKS if block.language == "python")
    assert all(re.search(rf"\b{name}\b", code) for name in STAND_INS)
    assert all(part in code for part in QUICK)


@pytest.fixture
def data_files(working_folder):
    """The files that the examples read."""
    with isolated(0):
        for name in ("counts.h5ad", "pbmc3k.h5ad", "big.h5ad"):
            cells().write_h5ad(name)
        paired().write_h5ad("glioblastoma.h5ad")
        atlas, patient = pair()
        known = (patient.obs["cell_type"] != "delta") & (np.arange(patient.n_obs) % 3 == 0)
        patient.obs["sorted_type"] = np.where(known, patient.obs["cell_type"], "")
        atlas.write_h5ad("atlas.h5ad")
        patient.write_h5ad("patient.h5ad")
        split = cells()
        vd.split_counts(split)
        split.obs["leiden"] = [str(i % 3) for i in range(split.n_obs)]
        split.write_h5ad("split.h5ad")
    np.save("log_weights.npy", np.random.default_rng(0).normal(size=(200, 3)))


@pytest.mark.parametrize("page", PYTHON, ids=lambda p: p.name)
def test_python_of_a_page_runs_from_top_to_bottom(page, data_files, capsys):
    if "classif" in page.read_text():
        pytest.importorskip("sklearn")
    if "import scanpy" in page.read_text():
        pytest.importorskip("scanpy")
    runnable = [b for b in code_blocks(page) if b.language == "python" and not b.not_run]
    used = {name for name in STAND_INS if any(re.search(rf"\b{name}\b", block.code) for block in runnable)}
    names: dict[str, Any] = {"vd": vd, "torch": torch} | {name: STAND_INS[name]() for name in used}
    for block in runnable:
        code = compile("\n" * (block.line - 1) + quickened(block.code), str(page), "exec")
        exec(code, names)


# --------------------------------------------------------------------------------------------------------- commands
def click_command() -> Any:
    typer = pytest.importorskip("typer")
    from vaerdict.cli.app import build

    return typer.main.get_command(build())


def parse(words: list[str]) -> None:
    """Parse a command as the real one would, without running it."""
    app = click_command()
    command = app.get_command(app.make_context("vaerdict", [], resilient_parsing=True), words[1])
    assert command is not None, f"vaerdict has no command {words[1]}"
    command.make_context(words[1], words[2:], resilient_parsing=False)


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=identity)
def test_commands_are_those_of_the_program(block, words):
    program, *rest = words
    if program == "vaerdict":
        parse(words)
    elif program == "make":
        assert rest[0] in re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", rest[-1])) <= extras.keys()
    else:
        assert block.not_run, f"{program} is not known here"


FASTER = {
    "de": ("--draws", "50", "--device", "cpu"),
    "calibrate": ("--draws", "50", "--device", "cpu", "--splits", "2", "--spikes", "1"),
}
"""Options that follow those of an example, and replace them."""


def run_in_order(command: Callable[..., tuple[int, str, str]], block: CodeBlock) -> None:
    for words in shell_lines(block):
        if words[0] == "vaerdict":
            quick = ("--quick", *FASTER[words[1]]) if words[1] in FASTER else ()
            code, out, err = command(*words[1:], *quick)
            assert code == 0, err
            assert "Page:" in out or words[1] == "diagnose"


def runnable_pages() -> list[Path]:
    runnable = {b.page for b, words in COMMANDS if words[0] == "vaerdict" and not b.not_run}
    return [page for page in PAGES if page in runnable]


@pytest.mark.parametrize("page", runnable_pages(), ids=lambda p: p.name)
def test_commands_of_a_page_run(page, data_files, command):
    pytest.importorskip("typer")
    for block in code_blocks(page):
        if block.language == "bash" and not block.not_run:
            run_in_order(command, block)


def mentioned() -> list[tuple[Path, str]]:
    """Commands in the text: `vaerdict ...` within backticks."""
    texts = {page: _FENCE.sub("", page.read_text(encoding="utf-8")) for page in [*PAGES, ROOT / "CONTRIBUTING.md"]}
    found = [(page, code) for page, text in texts.items() for code in re.findall(r"(?<!\\)`(vaerdict [^`]+)`", text)]
    return list(dict.fromkeys(found))


def test_commands_in_the_text_exist():
    app = click_command()
    context = app.make_context("vaerdict", [], resilient_parsing=True)
    assert len(mentioned()) > 20
    for page, code in mentioned():
        name, *words = shlex.split(code)[1:]
        command = app.get_command(context, name)
        assert command is not None, f"{page.name}: {code}"
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"{page.name}: {code} has no {', '.join(unknown)}"
