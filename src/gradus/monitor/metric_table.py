"""The table behind the catalogue: every metric that a run records.

`catalogue.py` says how a pattern is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Maker(StrEnum):
    """The process that makes a number."""

    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"
    BATCHER = "orchestrator, or a trainer without one"
    EVALUATOR = "orchestrator, or the evaluator of a supervised run"
    LAUNCHER = "launcher"


@dataclass(frozen=True)
class Metric:
    """One entry: all names of one pattern."""

    pattern: str
    unit: str
    """`1` for a number without one."""
    meaning: str
    maker: Maker


@dataclass(frozen=True)
class MetricSection:
    """Metrics that belong together on the page."""

    title: str
    introduction: str
    metrics: tuple[Metric, ...]


_TABLE = """
## Tasks
What became of tasks that no episode could train. Absent while it is zero.

orchestrator:
task[/<source>]/given_up/sum | tasks | Too slow every time; their turn comes again.
task/set_aside/sum | tasks | Cannot be played, and are not drawn again.
task/<source>/set_aside/<reason>/sum | tasks | The same by reason.

## Episodes
Of the episodes whose group became final since the record before. One that ended well is *finished*,
one with an error *failed*; both have *ended*. A source of which no episode ended has only
`ended/sum` and what is counted over its last groups.

orchestrator:
episode[/<source>]/ended/sum | episodes | Ended: the denominator of `error/share`.
episode/ended/total | episodes | Of the run so far.
episode[/<source>]/reward/{mean,p5,p50,p95} | 1 | Reward of each trained trace of the finished
  episodes. Absent where several agents train: of a zero-sum game it would always be 0.
episode[/<source>]/reward/std | 1 | Standard deviation of the same rewards.
episode/<source>/reward/<part>/mean | 1 | One part of the reward, without its weight. Absent where
  several agents train.
episode/<source>/reward/<part>/variance_share | 1 | Its covariance with the reward inside groups
  over the reward's variance there, weights included: the shares of all parts add up to 1, and that
  of a part that works against the reward is negative. Absent with one part, and where all groups
  are flat or several agents train.
episode/<source>/metric/<name>/mean | 1 | What the environment measures (`@vf.metric`); one whose
  name begins with `episode/` is of the whole episode, whichever trace holds it.
episode/<source>/agent/<agent>/reward/mean | 1 | Reward of one agent, also of one that does not
  train; where several agents play.
episode/<source>/agent/<agent>/reward/<part>/mean | 1 | One part of the reward of one agent.
episode/<source>/agent/<agent>/metric/<name>/mean | 1 | What the environment measures of one agent.
episode/<source>/agent/<agent>/trained/share | 1 | Of the finished episodes in which the agent
  played, those in which it trains.
episode[/<source>]/length_tokens/{mean,p5,p50,p95} | tokens | Sampled tokens of a finished episode.
episode[/<source>]/turns/{mean,p95} | turns | Model turns of a finished episode.
episode[/<source>]/prompt_tokens/{p5,p50,p95} | tokens | Of a trained trace.
episode/<source>/stop/<condition>/share | 1 | Of the trained traces, it ended.
episode[/<source>]/tool_calls/mean | calls | In a finished episode, if any.
episode[/<source>]/tool_error/share | 1 | Of these, the result begins with "Error".
episode[/<source>]/truncated/share | 1 | Of the finished episodes, those that a limit cut short.
episode[/<source>]/dropped/share | 1 | Of the finished episodes, those that train nothing: filtered,
  too old, no tokens.
episode[/<source>]/flat/share | 1 | Of the finished episodes, those of groups with equal rewards,
  from which no group algorithm learns.
episode[/<source>]/quarantined/share | 1 | Of the model turns of the finished episodes, those that
  the environment could not read and that do not train (`info.quarantined_turns`).
episode[/<source>]/tokens/sampled/sum | tokens | Of the ended episodes; once each.
episode[/<source>]/tokens/trained/share | 1 | Of these, those in a loss.
episode/<source>/tokens/untrained/<reason>/share | 1 | Of these, those that are not: the reason of a
  dropped sample, `failed`, `no_credit`, `too_long`, `quarantined`, or a program's `unread`,
  `top_p`, ...
episode[/<source>]/error/share | 1 | Of the ended episodes, those that failed.
episode[/<source>]/error/<error>/share | 1 | The same by type of error.
episode[/<source>]/error/<error>/sum | episodes | Failed, by type of error.
episode[/<source>]/cancelled/sum | episodes | Given up while they ran.
episode/retried/sum | episodes | Attempts that failed and were played again.
episode/<source>/retried/<error>/sum | episodes | The same by type of error.
episode/<source>/{boot,setup,agent,finalize,scoring}_seconds/{mean,p50,p95} | seconds | One stage of
  a finished episode, as verifiers measures it.
episode/<source>/{started,trained}_seconds/{p50,p95} | seconds | An episode from its start to its
  end, with its retries; of all that were started and of those that trained, over the last 128
  groups.
episode/<source>/{started,trained}_length_tokens/{p50,p95} | tokens | Sampled tokens of the same
  episodes, where they finished.
episode/<source>/slow_bias | 1 | 1 - (share of the slowest quarter of tasks that trained / share of
  all), over the last 128 groups; at most 0 while fewer than three slow tasks are lost.
episode/<source>/info_cut_bytes/mean | bytes | Cut from an `info` that was too large, of the traces
  of which something was cut.
episode/<source>/control_spellings/mean | times | How often tools or other agents said what spells
  the turns of a chat template, of the traces in which they did. It stays text.
episode/<source>/names_left_out/sum | values | Left out, because one record takes 200 names of one
  environment.

## Groups
Of the groups that became final since the record before.

orchestrator:
group[/<source>]/flat/share | 1 | Of the groups with two finished episodes or more, those with equal
  rewards.
group[/<source>]/{all_bad,all_good}/share | 1 | Equal at 0 or less; above 0.
group/abandoned/sum | groups | Given up while they ran.
group/<source>/abandoned/<reason>/sum | groups | The same by reason.
group[/<source>]/dropped/sum | groups | Played to their end and trained nothing.
group/<source>/<name>/mean | 1 | What the algorithm records of a group, such as a baseline.

## Samples
Of the samples that became final since the record before; staleness of those that train.

orchestrator:
sample/trainable/share | 1 | Of the samples that filters saw, those they kept.
sample/dropped/sum | samples | Trained nothing; failures are not samples.
sample/<source>/dropped/<reason>/sum | samples | The same by filter or reason.
sample/<source>/dropped/<reason>/share | 1 | The same, of all samples of the source.
sample/<source>/flagged/<filter>/sum | samples | Flagged by a filter, and trained.
sample/staleness/{mean,p50,p95,max} | steps | Trained version - oldest version that sampled.
sample/advantage/{std,p5,p50,p95} | 1 | Of a sample, the mean of its tokens.

trainer:
sample/skipped/total | conversations | Of a supervised run: different ones that are left out, for
  their length or because nothing is learned.
sample/skipped/share | 1 | The same, of those that were looked at so far.
sample/cut/total | replies | Of the episodes that it learns from: cut by a limit, and not learned.

## Batches
What one step trains, over all ranks.

orchestrator, or a trainer without one:
batch/samples/sum | samples | Samples.
batch/tokens/sum | tokens | Tokens that the model reads.
batch/trainable_tokens/sum | tokens | Tokens that may enter a loss.

orchestrator:
batch/samples/total | samples | Of the run so far.
batch/tokens/total | tokens | Of the run so far.

trainer:
batch/padding/share | 1 | Of the rows that are computed, those without a token.
batch/patches/max | patches | Of the images of one micro batch, each counted once.
batch/epoch | 1 | Of a supervised run: how often each conversation was learned that can be.

## Losses
Over the tokens of a component in the whole batch, on all ranks. Of several updates of a batch: of
means and percentiles the mean, of `/max` the largest, of `/sum` the sum.

trainer:
loss/total/mean | nats | What is minimised: the sum of the components.
loss/{rl,ce,ref_kl,ce_batch,ce_trace}/mean | nats | One component, where it has tokens.
loss/{ce,ce_batch,ce_trace}/nll/{mean,max} | nats | -logprob of the tokens that are learned by
  cross-entropy, without weights.
loss/{ce,ce_batch,ce_trace}/tokens/sum | tokens | How many these are.
loss/entropy/mean | nats | Entropy of the policy, of the main component's tokens.
loss/mismatch_kl/{mean,p50,p95,max} | nats | Trainer against engine on each rl token: ratio - ln
  ratio - 1. Percentiles are counted, and exact within 8 %.
loss/ratio/{p5,p50,p95,max} | 1 | Probability now over probability when it was sampled, of each rl
  token. The largest is the largest weight that a loss without a bound gives. Percentiles are exact
  within 4 % of ln ratio.
loss/effective_tokens/share | 1 | (sum of ratios)² / (rl tokens x sum of squared ratios): 1 where
  all are equal.
loss/<source>/{entropy,mismatch_kl}/mean | nats | The same by source.
loss/dropped_tokens/share | 1 | Rl tokens that the limit of the loss drops.
loss/outside_cap_tokens/share | 1 | Rl tokens beyond `importance_cap`.
loss/reference_kl/mean | nats | KL from the policy to the reference model, per rl token, estimated
  from what the policy sampled: ratio - ln ratio - 1, ratio = reference over policy. `mismatch_kl`
  is trainer against engine.
loss/engine_kl/mean | nats | With `recompute_logprobs`: the trainer before the first update against
  the engine, on rl tokens that this very version sampled: what only the engine computes otherwise.
  Absent where there is none.
loss/stale_kl/mean | nats | The same on tokens that older versions sampled too: engine and staleness
  together.
loss/<name> | 1 | Any other: a metric of a loss of your own.

## Optimizer
The update of a step.

trainer:
optimizer/grad_norm | 1 | Over all parameters and ranks, before clipping.
optimizer/lr | 1 | Learning rate.
optimizer/skipped/total | updates | Skipped, because a gradient was not finite.

## Validation
Of a supervised run, on conversations that are never learned.

trainer:
validation/loss/mean | nats | -logprob of a learned token.
validation/loss/before | nats | The same before the first step; once.
validation/tokens/sum | tokens | Learned tokens.

## Evaluations
In a separate record, of which `step` is the version. `<k>` of `avg@<k>` is the number of episodes
per task. Of all environments together there is no mean where in one of them every episode failed.

orchestrator, or the evaluator of a supervised run:
eval/version | 1 | The version that was measured.
eval/seconds | seconds | What it took.
eval[/<environment>]/avg@<k> | 1 | Mean over tasks of the mean reward of a task. Absent, as `pass`
  is, where several agents are measured.
eval/avg | 1 | The same over environments with different numbers of episodes.
eval[/<environment>]/pass@<k> | 1 | Chance that one of k episodes is solved.
eval[/<environment>]/pass^<k> | 1 | Chance that all of k episodes are solved.
eval[/<environment>]/episodes/sum | episodes | Ended.
eval[/<environment>]/error/share | 1 | Of the ended episodes, those that failed.
eval[/<environment>]/error/<error>/sum | episodes | Failed, by type of error.
eval[/<environment>]/truncated/share | 1 | Of the finished episodes, those that a limit cut short.
eval[/<environment>]/length_tokens/mean | tokens | Tokens that the model wrote in a finished
  episode.
eval/<environment>/length_tokens/{p5,p50,p95} | tokens | The same.
eval/<environment>/reward/<part>/mean | 1 | One part of the reward.
eval/<environment>/metric/<name>/mean | 1 | What the environment measures.
eval/<environment>/agent/<agent>/reward/mean | 1 | Reward of one agent of several.
eval/<environment>/agent/<agent>/reward/<part>/mean | 1 | One part of the reward of one agent.
eval/<environment>/agent/<agent>/metric/<name>/mean | 1 | What the environment measures of one
  agent.
eval/<environment>/{boot,setup,agent,finalize,scoring}_seconds/{mean,p50,p95} | seconds | One stage
  of a finished episode.
eval/<environment>/info_cut_bytes/mean | bytes | Cut from an `info`.
eval/<environment>/control_spellings/mean | times | Turns that others spelled.
eval/<environment>/names_left_out/sum | values | Beyond 200 names.

## Weights
The version that a step made.

orchestrator:
weights/version | 1 | Updates that the served weights contain.
weights/apply_seconds | seconds | From asking the engine until it serves it.
weights/pause_seconds | seconds | Of these, how long the engine stood still.

trainer:
weights/publish_seconds | seconds | From the end of the update to the last byte.

## Engine
Polls of the inference server, every two seconds, since the record before; differences of its
counters.

orchestrator:
policy/in_flight/{mean,max} | episodes | Being played.
policy/in_flight_limit | episodes | As many may be played at once.
policy/running/{mean,max} | requests | Being computed.
policy/waiting/{mean,max} | requests | In the engine's queue.
policy/kv_usage/{mean,max} | 1 | Share of the KV cache in use.
policy/preemptions/sum | requests | Thrown out of the KV cache, computed again.
policy/prompt_tokens/sum | tokens | Read as prompts.
policy/generated_tokens/sum | tokens | Generated.
policy/prefix_hit/share | 1 | Of the prompt tokens, those found in the KV cache.
policy/status_failed/sum | polls | Polls without an answer.
policy/servers_replaced/sum | servers | Started in the place of one that failed.
policy/asked_again/sum | requests | Not answered by a server that failed.
policy/replicas_up/min | servers | Of several, those that served the version.

## Time
Where the time of a step goes. The roles run at once: their times overlap.

orchestrator, or a trainer without one:
time/step_seconds | seconds | From the version before being served to this one; of a trainer alone,
  its step.

orchestrator:
time/generate_wait_seconds | seconds | A batch waited for its last episodes.
time/evaluation_hold_seconds | seconds | The version waited for an evaluation.
time/event_loop_lag_seconds/max | seconds | The orchestrator's loop was late.

trainer:
time/receive_seconds | seconds | The trainer waited for a batch.
time/score_seconds | seconds | Logprobs by the trainer before it learns.
time/forward_backward_seconds | seconds | Loss and gradients.
time/optimize_seconds | seconds | The update.
time/publish_seconds | seconds | Copying the weights; writing happens in the background.
time/validate_seconds | seconds | The loss on what is held out.

## Experts
Of mixtures of experts: the tokens that each expert of each layer got in the step, on all ranks.

trainer:
experts/load/max_over_mean | 1 | Those of the expert with most over those of the average one, mean
  of the layers: 1 where all have the same.
experts/unused/share | 1 | Experts that got none.

## Throughput
How well the devices are used.

orchestrator:
throughput/generated_tokens_per_second | tokens/s | Generated by the engine, over the time of the
  step.

trainer:
throughput/trained_tokens_per_second | tokens/s | Tokens read in forward and backward, over the time
  of learning.
throughput/model_teraflops_per_second | TFLOP/s | Of the model, for each device.
throughput/mfu/share | 1 | Of the device's peak, where that is known.
throughput/peak_memory_gib | GiB | Most memory so far, of the fullest rank.

## Alarms
What they measure and what to do is in [monitoring](monitoring.md#alarms). An alarm stands in each
record from the step on at which its number is known.

orchestrator:
alarm[/<source>]/<alarm>/value | 1 | The number that is compared.
alarm[/<source>]/<alarm> | 1 | 1 while it is on, else 0.

## Machine
Every ten seconds in `machine.jsonl`, of the launcher's machine alone; trackers get the last look
before a record with it. Not in `metrics.jsonl`. A process counts with all that it started.

launcher:
machine/disk_free_bytes | bytes | Free where the run lies.
machine/memory_available_bytes | bytes | Of the machine, free or soon freed.
machine/gpu_<number>/use | 1 | Share of the last second in which it computed anything.
machine/gpu_<number>/memory_bytes | bytes | In use, by whomever.
machine/gpu_<number>/power_watts | watts | It draws.
machine/<process>/cpu | cores | Kept busy since the look before.
machine/<process>/memory_bytes | bytes | Held. Pages that several processes share count in each.

## Live
Of this moment: in `live.json`, replaced once a second, and from there in the page for Prometheus;
not in `metrics.jsonl`. The engine is asked every two seconds.

orchestrator:
live/version | 1 | Updates that the served weights contain.
live/batches/trained | batches | Trained since the run began.
live/batches/untrained | batches | Sent and not trained, in the spool or there.
live/batches/unserved | batches | Trained, but the engine serves less.
live/slots/free | groups | As many may open now.
live/groups/{open,scoring,complete,shipped} | groups | Where they stand: being played, judged, ready
  for a batch, in one.
live/running/<source> | episodes | Being played.
live/in_flight/now | episodes | Being played, and ended ones not yet looked at.
live/in_flight/limit | episodes | As many may be played at once.
live/in_flight/planned | episodes | Of open groups, not started.
live/records/waiting | records | Final and not written, groups among them.
live/quiet_seconds | seconds | Since anything moved.
live/episodes/<source>/<outcome>/total | episodes | Ended: finished, failed or cancelled; over
  resumes too, those played again twice.
live/engine/answers | 1 | 1 if the engine answered when it was last asked.
live/engine/running | requests | Being computed.
live/engine/waiting | requests | In the engine's queue.
live/engine/kv_usage | 1 | Share of the KV cache in use.
live/engine/kv_capacity_tokens | tokens | The KV cache holds.
live/engine/paused | 1 | 1 while new weights are loaded.
live/engine/preemptions/total | requests | Thrown out of the KV cache; this and the totals below
  since the engine started.
live/engine/prompt_tokens/total | tokens | Read as prompts.
live/engine/generated_tokens/total | tokens | Generated.
live/engine/prefix_queries/total | tokens | Of prompts, looked up in the KV cache.
live/engine/prefix_hits/total | tokens | Of these, found there.
"""
"""For each section its title, what it is about, and by maker the pattern, unit and meaning of each
entry; a line that begins with spaces continues the one before it."""


def _read(section: str) -> MetricSection:
    head, *groups = section.strip().split("\n\n")
    title, introduction = head.split("\n", 1)
    metrics = []
    for group in groups:
        maker, *rows = re.split(r"\n(?! )", group)
        for row in rows:
            pattern, unit, meaning = " ".join(row.split()).split(" | ")
            metrics.append(Metric(pattern, unit, meaning, Maker(maker.removesuffix(":"))))
    return MetricSection(title, " ".join(introduction.split()), tuple(metrics))


SECTIONS = tuple(map(_read, _TABLE.strip().removeprefix("## ").split("\n\n## ")))
