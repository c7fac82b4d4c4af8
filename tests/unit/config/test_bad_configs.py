"""Every way to write a config wrong, with the words that tell the user what to do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from configs import RUN_TOML, SFT_TOML

from gradus.config import RunConfig, SftConfig, load_config
from gradus.errors import ConfigError, ExitCode
from gradus.plan.machine import check

MOST_SECONDS = 1.0
"""Of CPU time: what else runs on the machine says nothing about the check."""


@dataclass(frozen=True)
class Bad:
    """One wrong config: an overlay over a valid one, and words of the error."""

    name: str
    toml: str
    expected: tuple[str, ...]
    flags: tuple[str, ...] = ()


def bad(name: str, toml: str, *expected: str, flags: tuple[str, ...] = ()) -> Bad:
    return Bad(name=name, toml=toml, expected=expected, flags=flags)


def env(line: str) -> str:
    """An overlay with one source and one line in it."""
    return f'[[orchestrator.train.env]]\nid = "reverse-text"\n{line}\n'


UNKNOWN_KEYS = [
    bad("near miss at the top", "seedd = 1", "run.toml:1: seedd: unknown key; did you mean seed?"),
    bad(
        "near miss in a section", "[trainer]\nmicro_batch_token = 9", "trainer.micro_batch_tokens?"
    ),
    bad(
        "near miss two levels down", "[trainer.optimizer]\nwarmup_step = 1", "run.toml:2:", "warmup"
    ),
    bad("nothing like it", "[model]\nzzz = 1", "model.zzz: unknown key; remove it, or use one of"),
    bad("a key of another section", "lr = 1e-5", "unknown key here", "trainer.optimizer.lr?"),
    bad("a section that does not exist", "[wandbb]\nproject = 'x'", "wandbb: unknown key"),
    bad("near miss of a section", "[trainr]\nnum_processes = 1", "did you mean trainer?"),
    bad("in a source", env("group_sice = 4"), "run.toml:3", "env.0.group_size?"),
    bad("in an inline table", env("sampling = {temp = 1.0}"), "run.toml:3", "env.0.sampling.temp"),
    bad(
        "of another curriculum",
        env("curriculum = {type = 'uniform', easy_above = 1}"),
        "curriculum.easy_above",
    ),
    bad(
        "on the command line",
        "",
        "--max-stepz",
        "did you mean max_steps?",
        flags=("--max-stepz", "3"),
    ),
    bad("nested flag", "", "--trainer.lr", flags=("--trainer.lr", "3")),
    bad("camel case", "maxSteps = 3", "maxSteps: unknown key; did you mean max_steps?"),
]

WRONG_TYPES = [
    bad("text for a whole number", 'max_steps = "20"', "run.toml:1: max_steps: '20': "),
    bad("words for a whole number", 'max_steps = "many"', "run.toml:1: max_steps: 'many': "),
    bad("a fraction for a whole number", "max_steps = 2.5", "max_steps: 2.5: "),
    bad("a bool for a whole number", "max_steps = true", "max_steps: True: "),
    bad("text for a number", "[trainer.optimizer]\nlr = 'fast'", "trainer.optimizer.lr: 'fast': "),
    bad("text for a bool", "[trainer]\ndeterministic = 'yes'", "trainer.deterministic: 'yes': "),
    bad("a number for a bool", "[trainer]\ndeterministic = 1", "trainer.deterministic: 1: "),
    bad("a number for text", "[model]\nname = 7", "model.name: 7: "),
    bad("a number for a section", "trainer = 5", "trainer: 5: "),
    bad(
        "a table for a list of them",
        "[monitor]\ntype = 'wandb'",
        "monitor: Input should be a valid list",
    ),
    bad(
        "neither of two types",
        "[trainer.parallel]\ncompile = 3",
        "trainer.parallel.compile: 3: ",
        ", or ",
    ),
    bad("a table for a number", "[seed]\nx = 1", "run.toml:1: seed: "),
    bad(
        "a list for a table",
        "[model]\nname = 'someone/tiny'\n[inference]\nextra_args = []",
        "inference.extra_args: ",
    ),
    bad("a table for a list", env("state_columns = {a = 1}"), "env.0.state_columns: "),
    bad("a number in a list of text", env("state_columns = [1]"), "state_columns.0: 1: "),
    bad("an alarm nobody has", "[orchestrator]\nquiet_alarms = ['none']", "'none' is no alarm"),
    bad(
        "an alarm with two thresholds",
        "[[orchestrator.alarm]]\nmetric = 'x'\nabove = 2\nbelow = 1",
        "orchestrator.alarm.0: ",
        "exactly one of above and below",
    ),
    bad(
        "one value too few",
        "[trainer.optimizer]\nbetas = [0.9]",
        "run.toml:2: trainer.optimizer.betas.1: missing",
    ),
    bad(
        "one value too many",
        "[trainer.optimizer]\nbetas = [0.9, 0.9, 0.9]",
        "trainer.optimizer.betas: ",
    ),
    bad("a number as variable", "[trainer]\nenv_vars = {A = 1}", "trainer.env_vars.A: "),
    bad(
        "text on the command line",
        "",
        "--seed: 'x': ",
        flags=("--seed", "x"),
    ),
    bad("no value", "", "--seed", "needs a value after it", flags=("--seed",)),
    bad("broken JSON", "", "is not JSON", flags=("--trainer.optimizer.betas", "[0.9,")),
    bad("not to be switched off", "", "cannot be switched off", flags=("--no-seed",)),
    bad("a list of words", "", "a list as JSON in quotes", flags=("--seed", "1", "2")),
    bad("null for a number", 'max_steps = "None"', "max_steps: None: "),
]

OUT_OF_RANGE = [
    bad("no steps", "max_steps = 0", "max_steps: 0: "),
    bad("negative rate", "[trainer.optimizer]\nlr = -1e-5", "must be a number above 0"),
    bad(
        "another word", '[trainer.optimizer]\nlr = "Auto"', "run.toml:2", "must be a number above 0"
    ),
    bad("no rate at all", "[trainer.optimizer]\nlr = 0", 'must be a number above 0, or "auto"'),
    bad("a rate that is a truth", "[trainer.optimizer]\nlr = true", "must be a number above 0"),
    bad("nan", "[trainer.optimizer]\nlr = nan", "run.toml:2", "must be a finite number"),
    bad("infinity", "[trainer.optimizer]\nlr = inf", "must be a finite number"),
    bad("nan in a passed-through setting", env("taskset = {x = nan}"), "must be a finite number"),
    bad("a date", env("taskset = {x = 2024-01-01}"), "is a date or time; put it in quotes"),
    bad("port", "[inference]\nport = 70000", "inference.port: 70000: "),
    bad(
        "share of memory",
        "[inference]\ngpu_memory_utilization = 1.5",
        "gpu_memory_utilization: 1.5: ",
    ),
    bad("temperature", env("sampling = {temperature = -1}"), "sampling.temperature: -1: "),
    bad("greedy training", env("sampling = {temperature = 0}"), "nothing to learn from"),
    bad("top_p", env("sampling = {top_p = 1.5}"), "sampling.top_p: 1.5: "),
    bad("no source", "[orchestrator.train]\nenv = []", "orchestrator.train.env: "),
    bad("ratio", env("ratio = 0.0"), "env.0.ratio: 0.0: "),
    bad("negative seed", "seed = -1", "seed: -1: "),
    bad("large seed", "seed = 99999999999", "seed: 99999999999: ", "4294967295"),
    bad("length of the model", "[model]\nmax_length_tokens = 4", "model.max_length_tokens: 4: "),
]

WRONG_CHOICES = [
    bad("log level", "[log]\nlevel = 'verbose'", "log.level: 'verbose': "),
    bad("nothing to run", env("prepare = ['']"), "env.0.prepare: "),
    bad(
        "schedule",
        "[trainer.optimizer]\nschedule = 'cosin'",
        "optimizer.schedule: 'cosin': ",
        "mean 'cosine'?",
    ),
    bad("precision", "[trainer]\ncompute_dtype = 'fp16'", "compute_dtype: 'fp16': "),
    bad("optimizer", "[trainer.optimizer]\ntype = 'adam'", "did you mean 'adamw'?"),
    bad("optimizer that is not a table", "trainer.optimizer = 3", "trainer.optimizer: "),
    bad("key of another optimizer", "[trainer.optimizer]\ntype = 'sgd'\neps = 1e-8", "eps"),
    bad(
        "adapters with dropout",
        "[trainer.lora]\ndropout = 0.1",
        "trainer.lora.dropout: unknown key",
    ),
    bad(
        "modules beside an adapter",
        "[trainer.lora]\nmodules_to_save = ['lm_head']",
        "trainer.lora.modules_to_save: unknown key",
    ),
    bad("no target", "[trainer.lora]\ntarget_modules = []", "lora.target_modules: "),
    bad("rank above vLLM's", "[trainer.lora]\nrank = 513", "lora.rank: 513: "),
    bad(
        "broadcast adapters",
        '[trainer]\nweight_transfer = "broadcast"\nlora = {rank = 8}',
        "vLLM reads adapters from files",
    ),
    bad(
        "served adapters on experts",
        "[trainer.lora]\ntarget_modules = ['experts']",
        "no adapters on experts",
        "write 'merged'",
    ),
    bad(
        "moving biases under adapters", "trainer = {router_bias_rate = 0.001, lora = {}}", "write 0"
    ),
    bad("a rate below zero", "trainer.router_bias_rate = -0.1", "router_bias_rate: -0.1: "),
    bad("adapters set in vLLM", "[inference.extra_args]\nmax_loras = 2", "serves one adapter"),
    bad("floor above the peak", "[trainer.optimizer]\nmin_lr_ratio = 1.5", "min_lr_ratio: 1.5: "),
    bad("pool", env("pool = {type = 'elastik'}"), "env.0.pool"),
    bad("loss", "[trainer.loss]\ntype = 'dpo'", "'package.module:Class'; did you mean 'dppo'?"),
    bad(
        "algorithm",
        "[orchestrator.train.algo]\ntype = 'xx'",
        "algo.type: 'xx': ",
        "'package.module:Class'",
    ),
    bad("algorithm of a source", env("algo = {type = 'grpp'}"), "env.0.algo.type", "mean 'grpo'?"),
    bad("name of the run", "name = '../x'", "run.toml:1: name: '../x': "),
    bad("name of a source", env("name = 'a/b'"), "env.0.name: 'a/b': "),
    bad("id without a name", env("").replace("reverse-text", "a b"), "give the source a name"),
]

CONFLICTS = [
    bad("lag", "[orchestrator]\nmax_lag = 9", "max_lag: 9", "lower max_lag or raise max_staleness"),
    bad("one group", "[orchestrator]\nmax_in_flight_episodes = 4", "cannot hold one group of 8"),
    bad("no baseline", env("group_size = 1"), "gives grpo no baseline", "use at least 2"),
    bad("two of a name", f"{env('')}\n{env('')}", "'reverse-text' is already the name of source 0"),
    bad("other case", env("name = 'A'") + env("name = 'a'"), "already the name of source 0"),
    bad("micro batch", "[trainer]\nmicro_batch_tokens = 1024", "cannot hold the longest sample"),
    bad("warm-up", "[trainer.optimizer]\nwarmup_steps = 20", "never ends in 20 steps"),
    bad(
        "betas",
        "[trainer.optimizer]\nbetas = [0.9, 1.0]",
        "trainer.optimizer.betas.1: 1.0: ",
    ),
    bad("ranks", "[trainer]\nnum_processes = 999", "gives 999 ranks nothing to share"),
    bad("public host", "[inference]\nhost = '0.0.0.0'", "can be reached by others", "127.0.0.1"),
    bad("engine", "[inference.extra_args]\nmax_model_len = 9", "write model.max_length_tokens"),
    bad("body", env("sampling = {extra_body = {n = 2}}"), "has another owner: write group_size"),
    bad("harness without a name", env("agent = {harness = {id = 3}}"), "the name of a harness"),
    bad("harness below config", env("agent = {harness = {config = {}}}"), "stand beside its id"),
    bad(
        "role without place", env("agents = {judge = {model = 'm'}}"), "where is model 'm' served?"
    ),
    bad(
        "role at no address",
        env("agents = {j = {base_url = 'here:1', model = 'x'}}"),
        "agents.j.base_url: 'here:1': ",
    ),
    bad("role without model", env("agents = {j = {base_url = 'http://x'}}"), "which model of"),
    bad("key without place", env("agents = {j = {api_key_var = 'K'}}"), "base_url"),
    bad("address", env("address = 'localhost:1'"), "env.0.address: 'localhost:1': "),
    bad(
        "total",
        env("agent = {max_input_tokens = 9, max_total_tokens = 9}"),
        "leaves no token to sample",
    ),
    bad("own variable", "[trainer]\nenv_vars = {RANK = '0'}", "gradus sets it itself: torchrun"),
    bad("pipe", env("env_vars = {GRADUS_DEATH_PIPE = '3'}"), "that its launcher is gone"),
    bad("our prefix", "[inference]\nenv_vars = {GRADUS_X = ''}", "belong to gradus itself"),
    bad("hang", "[launch]\nhang_seconds = 10", "run.toml:2: launch.hang_seconds: 10", "least 20"),
    bad("no variable", "[orchestrator]\nenv_vars = {'A B' = ''}", "is not a name of a variable"),
]

NOT_HERE = [
    bad("model folder", "[model]\nname = './nowhere'", "run.toml:2", "no such directory"),
    bad("deep folder", "[model]\nname = 'runs/x/model'", "'runs/x/model': no such directory"),
    bad("home sign", "[model]\nname = '~/model'", "write the whole path"),
    bad("no model name", "[model]\nname = 'a b'", "neither a directory here nor a name on the hub"),
    bad(
        "environment", env("").replace("reverse", "revers"), "env.0.id", "'revers-text' is not inst"
    ),
    bad("dotted id", env("name = 'x'").replace("reverse-text", "a.b"), "is not installed"),
    bad("taskset", env("taskset = {id = 'nope'}"), "taskset 'nope' is not installed"),
    bad(
        "harness",
        env("agent = {harness = {id = 'chatt'}}"),
        "harness 'chatt' is not installed",
        "chat, ",
    ),
    bad("harness of a role", env("agents = {a = {harness = {id = 'x9'}}}"), "agents.a.harness.id"),
    bad("loss module", "[trainer.loss]\ntype = 'no.where:X'", "module 'no.where' is not installed"),
    bad("algorithm module", env("algo = {type = 'no:X'}"), "env.0.algo.type", "module 'no'"),
    bad("output", "output_dir = '/dev/null/runs'", "'/dev/null' is not a directory"),
]

BROKEN_FILES = [
    bad("no end of a text", 'a = 1\nname = "x', "run.toml:2: not TOML"),
    bad("no equals sign", "\n\nmax_steps 3", "run.toml:3: not TOML"),
    bad("a key twice", "seed = 1\nseed = 2", "run.toml:", "not TOML"),
    bad("a table twice", "[model]\n[model]", "run.toml:2: not TOML"),
    bad("no file", "", "nowhere.toml: no such config file", flags=("@", "nowhere.toml")),
    bad("no file behind the sign", "", "needs a file after it", flags=("@",)),
    bad("other suffix", "", "must end in .toml or .json", flags=("@", "run.yaml")),
    bad("a lonely word", "", "unexpected 'oops'", flags=("oops",)),
    bad("half a key", "", "must not begin or end with a dot", flags=("--trainer.", "x")),
    bad(
        "no such entry",
        "",
        "no such entry; the list has 1",
        flags=("--orchestrator.train.env.5.id", "x"),
    ),
]

ALL = [
    *UNKNOWN_KEYS,
    *WRONG_TYPES,
    *OUT_OF_RANGE,
    *WRONG_CHOICES,
    *CONFLICTS,
    *NOT_HERE,
    *BROKEN_FILES,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a valid base config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(RUN_TOML)
    (tmp_path / "run.yaml").write_text("")
    return tmp_path


def test_the_base_of_the_table_is_a_valid_config(folder: Path) -> None:
    assert load_config(RunConfig, ["@", "base.toml"], check=check).max_steps == 20


@pytest.mark.shows("F74")
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name.replace(" ", "_"))
def test_bad_config_is_refused_with_words_that_help(case: Bad, folder: Path) -> None:
    (folder / "run.toml").write_text(case.toml)
    before = sorted(folder.rglob("*"))
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", "base.toml", "@", "run.toml", *case.flags], check=check)
    assert time.process_time() - started < MOST_SECONDS
    message = str(caught.value)
    assert [words for words in case.expected if words not in message] == [], message
    assert caught.value.exit_code == ExitCode.CONFIG
    assert sorted(folder.rglob("*")) == before


def test_the_table_is_as_long_as_promised() -> None:
    assert len({(case.name, case.toml) for case in ALL}) >= 60


def test_a_whole_missing_config_names_each_required_key(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, [])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model", "orchestrator"]
    assert "The policy, shared by trainer and inference" in lines[0]


def test_a_missing_key_names_the_line_of_its_section(folder: Path) -> None:
    (folder / "run.toml").write_text("max_steps = 1\n[model]\nrenderer = 'auto'\n")
    with pytest.raises(ConfigError, match=r"run\.toml:2: model\.name: missing"):
        load_config(RunConfig, ["@", "run.toml"])


@pytest.mark.shows("F74")
def test_all_problems_are_told_at_once(folder: Path) -> None:
    (folder / "run.toml").write_text('max_steps = "x"\nseedd = 1\n[trainer]\nlos = 3\n')
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", "base.toml", "@", "run.toml", "--model.nam", "y"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert {line.split(": ")[0] for line in lines} == {
        "run.toml:1",
        "run.toml:2",
        "run.toml:4",
        "--model.nam",
    }


def test_all_broken_files_are_told_at_once(folder: Path) -> None:
    (folder / "run.toml").write_text("=")
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", "run.toml", "@", "nowhere.toml", "stray"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.shows("SEC9")
def test_the_value_of_a_variable_is_never_shown(folder: Path) -> None:
    (folder / "run.toml").write_text("[trainer]\nenv_vars = {TOKEN = 987654321}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", "base.toml", "@", "run.toml"])
    assert "987654321" not in str(caught.value)


def test_a_long_value_is_shortened(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", "base.toml", "--seed", "x" * 5000])
    assert len(str(caught.value)) < 200


SFT_CASES = [
    bad("no data file", "[data]\npath = 'none.jsonl'", "data.path: 'none.jsonl': no such file"),
    bad("empty data file", "[data]\npath = 'empty.jsonl'", "data.path"),
    bad("no roles", "[data]\ntrain_roles = []", "data.train_roles: "),
    bad("precision", "compute_dtype = 'fp8'", "'auto', 'bfloat16' or 'float32'"),
    bad("more ranks than samples", "batch_conversations = 1\nnum_processes = 2", "2 ranks nothing"),
    bad("micro batch", "micro_batch_tokens = 100", "cannot hold the longest sample"),
    bad("own variable", "env_vars = {WORLD_SIZE = '2'}", "gradus sets it itself"),
    bad("warm-up", "max_steps = 3\n[optimizer]\nwarmup_steps = 5", "never ends in 3 steps"),
]


@pytest.mark.parametrize("case", SFT_CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_bad_supervised_config_is_refused(case: Bad, folder: Path) -> None:
    (folder / "base.toml").write_text(SFT_TOML)
    (folder / "empty.jsonl").touch()
    (folder / "run.toml").write_text(case.toml)
    with pytest.raises(ConfigError) as caught:
        load_config(SftConfig, ["@", "base.toml", "@", "run.toml"], check=check)
    assert [words for words in case.expected if words not in str(caught.value)] == []
