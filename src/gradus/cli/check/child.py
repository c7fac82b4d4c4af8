"""The child side of `gradus check`: loads one part of a config and says what it saw.

`python -m gradus.cli.check.child PART REQUEST RESULT` reads what to look at from the file REQUEST
and writes {"seen": ...} or {"refused": ...} to the file RESULT. Each part imports only what the
process would import that plays it in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.cli.check.parts import WARNING
from gradus.companions import misfits, show_torchvision
from gradus.config import (
    EnvironmentProcessConfig,
    InferenceProcessConfig,
    ModelConfig,
    RunProcessConfig,
    SftConfig,
    SourceConfig,
    TrainerConfig,
    algorithms,
)
from gradus.errors import ConfigError, ExitCode, GradusError, first_line
from gradus.files import write_json
from gradus.installed import see_folder
from gradus.log import configure_logging
from gradus.plan.machine import model_note
from gradus.processes.child import watch_death_pipe
from gradus.run.model_files import (
    image_token,
    model_config,
    most_image_tokens,
    reads_images,
    text_part,
)

if TYPE_CHECKING:
    from gradus.environments.tasks import TaskIndex

NUM_PROMPTS = 8
"""Tasks of a source whose first prompts are measured."""
ROWS_SECONDS = 20.0
"""How long rows of supervised data are made into samples; reading goes over all."""
MANY_SKIPPED = 0.1
Request = Mapping[str, Any]


def probe_model(request: Request) -> str:
    """The policy's tokenizer, its chat template and its renderer."""
    from gradus.environments.verifiers.plain_content import plain_renderer
    from gradus.orchestrator.play.renderer import build_renderer, load_policy_tokenizer

    model = ModelConfig.model_validate(request["model"])
    settings, how = renderer_of(model)
    tokenizer = load_policy_tokenizer(model.tokenizer or model.name, settings)
    # As environments build it, with what they refuse.
    plain_renderer(lambda marked, _: build_renderer(marked, settings), tokenizer)
    read = f"vocabulary of {len(tokenizer):,}, renderer {settings['name']} ({how})"
    # What the engine stops at.
    stops = build_renderer(tokenizer, settings).get_stop_token_ids()
    return "\n".join(
        [f"{read}; {model_note(model.name)}", *_text_warnings(model, tokenizer, stops)]
    )


def _text_warnings(
    model: ModelConfig, tokenizer: Any, stop_token_ids: Collection[int]
) -> Iterator[str]:
    """What of a tokenizer and its template goes well with this model in part only; ConfigError for
    a token of the template that the model has no row for."""
    from gradus.tokenizing import lacking_row, learned_text, misread, reply_end

    rows = text_part(model_config(model.name)).get("vocab_size")
    if refusal := lacking_row(tokenizer, learned_text(tokenizer), rows):
        raise ConfigError(f"the chat template of {model.name!r} writes {refusal}")
    last = max(tokenizer.get_vocab().values())
    found = [misread(tokenizer), reply_end(tokenizer, stop_token_ids).warning]
    if isinstance(rows, int) and last >= rows:
        found.append(
            f"the tokenizer has tokens up to {last}, and the model {rows} rows: a text with one of "
            "the others ends a run; resize the embeddings where they are needed"
        )
    yield from (f"{WARNING}{text}" for text in found if text)


def probe_environment(request: Request) -> str:
    """The environment's settings, roles and tasks, and its first prompt as the policy reads it."""
    from gradus.environments.containers import engines_of, refuse_silent
    from gradus.environments.harness.fitness import declared_tools
    from gradus.environments.harness.reward_trial import try_reward
    from gradus.environments.roles import complete_roles
    from gradus.environments.tasks import load_tasks

    config = EnvironmentProcessConfig.model_validate(request["config"])
    model = request["model"] and ModelConfig.model_validate(request["model"])
    if config.reads_images:
        # Before anything imports transformers; prompts are rendered with their images.
        show_torchvision()
    settings = complete_roles(config.name, config.verifiers)
    refuse_silent(engines_of(settings))
    tasks = load_tasks(
        config.name,
        settings,
        is_rendered=request["plays"],
        reads_images=config.reads_images,
        selection=config.tasks,
        warm_containers=config.warm_containers,
        asks_by_text=config.asks_by_text,
    )
    number = "endless" if tasks.num_tasks is None else f"{tasks.num_tasks:,}"
    seen = [f"{number} tasks", f"played by {', '.join(tasks.agents)}"]
    count = NUM_PROMPTS if tasks.num_tasks is None else min(NUM_PROMPTS, tasks.num_tasks)
    first = asyncio.run(_first_tasks(tasks, count))
    task_data = first[0]
    if config.algo is not None:
        _check_learning(config, request, tasks.agents, tasks.num_tasks, task_data)
    if model is not None:
        tools = declared_tools(settings) if tasks.offers_tools else []
        seen += _first_prompts(config.name, model, first, tools, offers_tools=tasks.offers_tools)
    elif tasks.offers_tools:
        seen.append("with tools")
    if tasks.missing_modules:
        names = ", ".join(tasks.missing_modules)
        seen.append(f"may import while it plays what is not installed: {names}")
    warned = try_reward(tasks.finite_tasks) if len(tasks.agents) == 1 else []
    return "\n".join([", ".join(seen), *(f"{WARNING}{text}" for text in warned)])


def _check_learning(
    config: EnvironmentProcessConfig,
    request: Request,
    agents: Mapping[str, bool],
    num_tasks: int | None,
    task_data: Request,
) -> None:
    """ConfigError for what the algorithm or the curriculum cannot learn from, as in a run."""
    from gradus.orchestrator.algorithms import compares_all_traces
    from gradus.orchestrator.algorithms.distill import demonstration_refusal
    from gradus.orchestrator.play.curriculum import build_curriculum

    assert config.algo is not None
    refusal = config.algo.seat_refusal(
        agents,
        config.untrained_agents,
        has_learner_seat=task_data.get(algorithms.LEARNER_SEAT) is not None,
        compares_all_traces=compares_all_traces(config.algo),
    )
    if isinstance(config.algo, algorithms.OpsdConfig):
        refusal = refusal or demonstration_refusal(task_data, config.algo.demonstration)
    if refusal is not None:
        raise ConfigError(f"source {config.name!r}: {refusal}")
    source = SourceConfig.model_validate(request["source"])
    build_curriculum(source.curriculum, source=config.name, num_tasks=num_tasks, seed=0)


async def _first_tasks(tasks: TaskIndex, count: int) -> list[dict[str, Any]]:
    return [(await tasks.task(index))["task_data"] for index in range(count)]


def _first_prompts(
    source: str,
    model: ModelConfig,
    tasks: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    offers_tools: bool,
) -> list[str]:
    """How long the prompts of the first tasks are; ConfigError when none leaves a token."""
    from gradus.orchestrator.play.renderer import check_tools, load_policy_tokenizer, render

    settings, _ = renderer_of(model)
    with_renderer = model.model_copy(update={"renderer": settings})
    check_tools(source, with_renderer, offers_tools=offers_tools)
    seen = ["with tools"] if offers_tools else []
    prompts = [messages for task in tasks if (messages := _messages(task))]
    if not prompts:
        return [*seen, "the user opens"]
    tokenizer = load_policy_tokenizer(model.tokenizer or model.name, settings)
    rendered = [render(tokenizer, settings, messages, tools or None) for messages in prompts]
    lengths = [*map(len, rendered)]
    limit, shortest, longest = model.max_length_tokens, min(lengths), max(lengths)
    found = f"{shortest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
    if shortest >= limit:
        with_tools = ", the declarations of their tools included" if tools else ""
        raise ConfigError(
            f"source {source!r}: the first prompts have {found}{with_tools}, which leaves none to "
            f"sample in model.max_length_tokens = {limit}; raise it"
        )
    too_long = sum(length >= limit for length in lengths)
    left = (
        f", {too_long} of {len(lengths)} too long for model.max_length_tokens" if too_long else ""
    )
    return [*seen, f"first prompts {found}{left}", *largest_image(model.name, rendered)]


def largest_image(model: str, prompts: list[list[int]]) -> Iterator[str]:
    """How many tokens the largest image of these prompts takes, and how many any could."""
    placeholder = image_token(model_config(model)) if reads_images(model) else None
    runs = [
        sum(1 for _ in group)
        for ids in prompts
        for token, group in itertools.groupby(ids)
        if token == placeholder
    ]
    if runs:
        most = most_image_tokens(model)
        bound = "" if most is None else f" (the processor makes at most {most:,} of one)"
        yield f"their largest image {max(runs):,} of them{bound}"


def _messages(task_data: Request) -> list[dict[str, Any]]:
    system, prompt = task_data.get("system_prompt"), task_data.get("prompt")
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(prompt or [])] if prompt else []


def renderer_of(model: ModelConfig) -> tuple[dict[str, Any], str]:
    """The renderer that a run would take, and how it is found."""
    from gradus.orchestrator.play.renderer import (
        AUTO,
        find_renderer,
        known_renderer,
        reads_tool_calls,
    )

    settings = known_renderer(model)
    if settings is not None:
        is_written = model.renderer_settings["name"] != AUTO
        return settings, "as written" if is_written else "by the model's name"
    found = find_renderer(model.tokenizer or model.name)
    settings = {**model.renderer_settings, **found}
    reads = reads_tool_calls(settings)
    return settings, "by its chat template" if reads else "its chat template; reads no tool calls"


def probe_plug_ins(request: Request) -> str:
    """Algorithms, filters and curricula, built with their options."""
    from gradus.orchestrator.algorithms import build_algorithm, needs_reference
    from gradus.orchestrator.groups.filters import build_filters
    from gradus.orchestrator.play.curriculum import build_curriculum

    config = RunProcessConfig.model_validate(request["run"])
    build_filters(config.orchestrator.filters, vocabulary_size=1)
    for source in config.sources:
        # A reference answers only when a group is scored.
        reference: Any = object() if needs_reference(source.algo) else None
        build_algorithm(source.algo, reference)
        build_curriculum(source.curriculum, source=source.name, num_tasks=1, seed=config.seed)
    chosen = [
        *(source.algo for source in config.sources),
        *config.orchestrator.filters,
        *(source.curriculum for source in config.sources),
    ]
    own = [plugin for plugin in chosen if not plugin.implementation]
    return ", ".join(dict.fromkeys(plugin.type for plugin in own or chosen))


def probe_trainer(request: Request) -> str:
    """The loss with its options, and a device for each process."""
    import torch

    seen = []
    if request["loss"] is not None:
        from gradus.trainer.losses import build_loss

        loss = TrainerConfig.model_validate({"loss": request["loss"]}).loss
        build_loss(loss)
        seen.append(f"{'loss' if loss.implementation else 'your loss'} {loss.type}")
    wanted, found = request["num_processes"], torch.cuda.device_count()
    if found and wanted > found:
        raise ConfigError(f"num_processes = {wanted}, but this machine has {found} GPUs; lower it")
    seen.append(f"{wanted} of {found} GPUs" if found else "CPU")
    return ", ".join(seen)


def probe_data(request: Request) -> str:
    """Every row of supervised data read, and as many as time allows made into samples."""
    sft = SftConfig.model_validate(request["sft"])
    if reads_images(sft.model.name):
        # Before anything imports transformers.
        show_torchvision()
    from gradus.trainer.data.conversation_files import load_data_sets
    from gradus.trainer.data.images import DataImages
    from gradus.trainer.entry.sft import build_encoder, image_processor, load_held_out
    from gradus.trainer.model.load import load_tokenizer
    from gradus.wire.control_tokens import read_stop_token_ids

    images = DataImages()
    conversations, _ = load_data_sets(sft.data, images)
    is_here = sft.validation is not None and Path(sft.validation.path).exists()
    held_out = load_held_out(sft, images) if is_here else []
    seen = f"{len(conversations):,} conversations"
    if not request["has_model"]:
        return seen
    processor = image_processor(sft, images)
    tokenizer = load_tokenizer(sft.model)
    stops = read_stop_token_ids(sft.model.name, sft.model.tokenizer)
    warned = [*_text_warnings(sft.model, tokenizer, stops)]
    encoder = build_encoder(sft, tokenizer, images, processor)
    seen += f", {_encoded(sft, encoder, [*held_out, *conversations], len(held_out))}"
    return "\n".join([seen, *warned])


def _encoded(sft: SftConfig, encoder: Any, rows: list[Any], num_held_out: int) -> str:
    """What comes of the rows, of which the first are held out; ConfigError for a wrong one, and
    when none can be learned."""
    from gradus.trainer.data.stream import encode_row
    from gradus.trainer.entry.sft import most_tokens

    limit, end = most_tokens(sft), time.monotonic() + ROWS_SECONDS
    skipped: Counter[str] = Counter()
    longest = largest = count = 0
    for number, row in enumerate(rows):
        found = encode_row(encoder, row, limit)
        if number < num_held_out:
            continue
        count += 1
        skipped.update([found.skipped] if found.skipped else [])
        for sample in found.samples:
            longest = max(longest, len(sample))
            largest = max(largest, *(it.length for it in sample.images), 0)
        if time.monotonic() > end:
            break
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
    left_out = f"{skipped.total():,} of {count:,} rows are left out: {reasons}"
    if skipped.total() == count:
        raise ConfigError(f"{sft.data.path!r}: {left_out}; raise the limits, or look at the roles")
    which = "all" if count + num_held_out == len(rows) else f"the first {count:,}"
    shown = f", their largest image {largest:,} of them" if largest else ""
    seen = f"{which} up to {longest:,} tokens long{shown}"
    if not skipped:
        return seen
    is_much = skipped.total() >= MANY_SKIPPED * count
    return f"{seen}\n{WARNING}{left_out}" if is_much else f"{seen}, {left_out}"


def probe_engine(request: Request) -> str:
    """vLLM with everything that the server imports, the engine's own check of its arguments, and a
    device for each part of the model."""
    from gradus.inference.settings import CLEARED_VARIABLES, is_cpu_build, process_environment

    engine, is_cpu = InferenceProcessConfig.model_validate(request["engine"]), is_cpu_build()
    cores = len(os.sched_getaffinity(0))
    os.environ.update(process_environment(engine, os.environ, is_cpu=is_cpu, num_cores=cores))
    for name in CLEARED_VARIABLES:
        os.environ.pop(name, None)
    from gradus.inference.vllm_server import build_arguments, engine_config

    # Loaded only with the model, and what breaks when its build does not fit that of torch.
    importlib.import_module("vllm.model_executor.model_loader")
    for name in ("torchvision", "torchaudio"):
        import_if_installed(name)
    import torch
    import vllm

    size, num_gpus = engine.inference.tensor_parallel_size, torch.cuda.device_count()
    if num_gpus:
        check_size(size, num_gpus)
    arguments = build_arguments(engine)
    if request["has_model"]:
        with engine_config(arguments):
            pass
    hidden = misfits()
    without = f"; hidden, since they need CUDA: {', '.join(hidden)}" if hidden else ""
    where = "CPU" if is_cpu else f"{size} of {num_gpus} GPUs"
    return f"vLLM {vllm.__version__} on {where}{without}"


def check_size(size: int, num_gpus: int) -> None:
    """ConfigError when the parts of the model are more than the GPUs."""
    if size > num_gpus:
        raise ConfigError(
            f"inference.tensor_parallel_size = {size}, but this machine has {num_gpus} GPUs; "
            f"lower it to {num_gpus}"
        )


def import_if_installed(name: str) -> None:
    """Packages that transformers imports as soon as they are there; a wrong build ends the run."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{name} does not fit this torch: {first_line(error)}. Models need it no more than "
            f"gradus does: pip uninstall {name}, or install the build that belongs to this torch"
        ) from error


PARTS: Mapping[str, Callable[[Request], str]] = {
    "model": probe_model,
    "environment": probe_environment,
    "plug-ins": probe_plug_ins,
    "trainer": probe_trainer,
    "data": probe_data,
    "engine": probe_engine,
}


def main(
    part: str,
    request: Path,
    result: Path,
    parts: Mapping[str, Callable[[Request], str]] = PARTS,
) -> None:
    """Look at one part; every failure is an answer."""
    see_folder()
    watch_death_pipe()
    configure_logging(f"check_{part}")
    answer: dict[str, Any]
    try:
        answer = {"seen": parts[part](json.loads(request.read_bytes()))}
    except GradusError as error:
        answer = {"refused": str(error), "is_away": error.exit_code == ExitCode.TRY_AGAIN}
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split()) or "no message"
        answer = {"refused": f"{type(error).__name__}: {text}"}
    with contextlib.suppress(FileNotFoundError):  # the command that asked has gone
        write_json(result, answer)
    # Threads of libraries must not keep the answer waiting.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
