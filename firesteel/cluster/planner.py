"""How many of which node, what limits them, how long it takes: rates by formula, the best split of the nodes, and the same run simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from firesteel.cluster.costs import (
    Memory,
    Rates,
    fewest_accelerators,
    link_rate,
    local_rate,
    server_memory,
    server_rate,
    state_bytes,
    step_flops,
    step_seconds,
    trainer_memory,
)
from firesteel.cluster.hardware import Hardware
from firesteel.cluster.shapes import DrafterShape, TargetShape
from firesteel.cluster.simulate import Outcome, Simulation, Site
from firesteel.cluster.topology import Topology
from firesteel.recipe import Recipe

_UNITS = 400_000  # units of a simulation at most; more are bundled
_HOUR = 3600.0


@dataclass(frozen=True)
class Split:
    """One way to divide nodes: inference nodes, training nodes, tokens a second, and how busy the trainers are."""

    inference: int
    training: int
    rate: float
    busy: float

    @property
    def nodes(self) -> int:
        return self.inference + self.training


@dataclass(frozen=True)
class Plan:
    """What `firesteel plan` knows. Rates are tokens a second of documents; `limits` are those of all servers, links and trainers together.

    Attributes:
        server_nodes: nodes that one server needs at least; None where not even 1,024 accelerators hold it.
        best: the split of as many nodes with the highest rate, and among those the fewest nodes.
        splits: others, by training nodes.
        balance: inference nodes whose servers one training node keeps up with.
        hours: of training, and of capturing before it, where the budget is known.
        before: those of capturing, where states are kept and not streamed, and the corpus is known.
        advice: what to change first.
    """

    target: TargetShape
    drafter: DrafterShape
    kinds: tuple[str, str]
    nodes: int
    server_nodes: int | None
    accelerators: int
    server_memory: Memory
    trainer_memory: Memory
    state_bytes: float
    rates: Rates
    limits: dict[str, float]
    bottleneck: str
    rate: float
    step_tokens: float
    best: Split | None
    splits: tuple[Split, ...]
    balance: float
    tokens: float | None
    hours: float | None
    before: float
    advice: str
    notes: tuple[str, ...]
    simulated: Outcome | None = None
    unit_documents: int = 1
    simulated_rate: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_plan(
    recipe: Recipe,
    topology: Topology,
    hardware: Mapping[str, Hardware],
    target: TargetShape,
    drafter: DrafterShape,
    *,
    length: int | None = None,
    tokens: float | None = None,
    simulate: float = _HOUR,
    failure_every: float | None = None,
) -> Plan:
    """Plan a run on the nodes of a topology, whose first server and trainer stand for all.

    Args:
        length: tokens of a document; None: half of `hidden.max_length`, which is a guess.
        tokens: of the whole training; None: what the recipe's steps make.
        simulate: seconds to simulate; 0: none.
        failure_every: mean seconds between failures of one server in the simulation, each away for five minutes; None: none fails.
    """
    length = max(1, recipe.hidden.max_length // 2) if length is None else length
    spot, trainer = topology.servers[0], topology.trainers[0]
    kinds = (spot.nodes[0].kind, trainer.node.kind)
    server_hw, trainer_hw = hardware[kinds[0]], hardware[kinds[1]]
    target = computed_here(recipe, target, server_hw)
    concurrency = recipe.hidden.feed.concurrency
    per_token = state_bytes(target, drafter.captured, recipe.hidden.codec)
    if recipe.target.engine == "local":
        server = local_rate(target, server_hw, length, recipe.hidden.batch_tokens)
    else:
        server = server_rate(target, server_hw, spot.accelerators, length, concurrency, spans=len(spot.nodes))
    processes, training = topology.world_size, len(topology.trainers)
    step = step_seconds(drafter, recipe.train, trainer_hw, length, processes=processes, nodes=training)
    step_tokens = float(recipe.train.batch_tokens * recipe.train.accumulate * processes // recipe.train.context_ranks)
    rates = Rates(server, link_rate(trainer_hw, per_token), step_tokens / step / training, step)
    limits = {"servers": server * len(topology.servers), "links": rates.link * training, "trainers": rates.trainer_node * training}
    shared = any(t.node in s.nodes for s in topology.servers for t in topology.trainers)
    kept = shared and recipe.hidden.store != "stream"  # the target reads everything once, and then training has the machine
    if shared and not kept:
        limits["machine"] = 1 / (1 / limits["servers"] + 1 / limits["trainers"])  # both, in turn
    bottleneck = "trainers" if kept else min(limits, key=lambda k: limits[k])
    flops = step_flops(drafter, recipe.train.batch_tokens, recipe.train.anchors, length)
    total = _tokens(recipe, step_tokens, tokens, limits[bottleneck])
    before = tokens / limits["servers"] / _HOUR if kept and tokens is not None else 0.0
    spans = len(spot.nodes)
    per_server_nodes = spans if spans > 1 else spot.accelerators / spot.nodes[0].accelerators
    fewest = fewest_accelerators(target, server_hw, recipe.hidden.max_length, concurrency)
    each = spot.nodes[0].accelerators
    nodes = len(topology.nodes)
    splits = _splits(nodes, spans, server / per_server_nodes, rates)
    plan = Plan(
        target=target,
        drafter=drafter,
        kinds=kinds,
        nodes=nodes,
        server_nodes=None if fewest is None else math.ceil(fewest / each),
        accelerators=spot.accelerators,
        server_memory=server_memory(target, server_hw, spot.accelerators, recipe.hidden.max_length, concurrency),
        trainer_memory=trainer_memory(target, drafter, recipe.train, trainer_hw, recipe.target.dtype, processes),
        state_bytes=per_token,
        rates=rates,
        limits=limits,
        bottleneck=bottleneck,
        rate=limits[bottleneck],
        step_tokens=step_tokens,
        best=_best(splits),
        splits=splits,
        balance=rates.trainer_node / (server / per_server_nodes),
        tokens=total,
        hours=None if total is None else before + total / limits[bottleneck] / _HOUR,
        before=before,
        advice=_advice(recipe, {"trainers": limits["trainers"]} if kept else limits, bottleneck, rates, server / per_server_nodes, flops),
        notes=_notes(target, length, tokens, processes, limits["servers"] if kept else None),
    )
    return plan if simulate <= 0 or shared else _simulated(plan, recipe, topology, length, simulate, failure_every)


def computed_here(recipe: Recipe, target: TargetShape, hw: Hardware) -> TargetShape:
    """A float32 target as the local engine multiplies it on a CPU: in bfloat16 where that is faster and `hidden.precision` leaves it open."""
    faster = target.precision == "fp32" and recipe.hidden.precision != "float32" and hw.peak("bf16") > hw.peak("fp32")
    return replace(target, precision="bf16") if faster and recipe.target.engine == "local" else target


def _splits(nodes: int, spans: int, per_node: float, rates: Rates) -> tuple[Split, ...]:
    """Every division of `nodes` into whole servers and at least one training node."""
    found = []
    for training in range(1, nodes):
        inference = (nodes - training) // spans * spans
        if inference:
            able = training * min(rates.trainer_node, rates.link)
            rate = min(inference * per_node, able)
            found.append(Split(inference, training, rate, rate / (training * rates.trainer_node)))
    return tuple(found)


def _best(splits: tuple[Split, ...]) -> Split | None:
    """The highest rate; among splits within 1% of it, the one with the fewest nodes."""
    if not splits:
        return None
    top = max(s.rate for s in splits)
    return min((s for s in splits if s.rate >= 0.99 * top), key=lambda s: (s.nodes, s.training))


def _tokens(recipe: Recipe, step_tokens: float, tokens: float | None, rate: float) -> float | None:
    """Tokens that training reads: as told, or by the recipe's steps or minutes, whichever are fewer; None where only an unknown corpus ends it."""
    train = recipe.train
    bounds = [] if tokens is None else [tokens * (train.epochs or 1.0)]
    bounds += [train.max_steps * step_tokens] if train.max_steps is not None else []
    bounds += [train.max_minutes * 60 * rate] if train.max_minutes is not None else []
    return min(bounds, default=None)


def _advice(recipe: Recipe, limits: Mapping[str, float], bottleneck: str, rates: Rates, per_node: float, flops: float) -> str:
    if bottleneck == "servers":
        first = f"add inference nodes (each brings {per_node:,.0f} tokens/s), or move nodes from training to inference"
    elif bottleneck == "machine":
        first = "let another machine capture or train; or capture once for several passes (hidden.store=disk)"
    elif bottleneck == "links" and recipe.hidden.codec != "fp8":
        first = "set hidden.codec=fp8, which halves the states"
    elif bottleneck == "links":
        first = "capture fewer layers (target.layer_ids), or take a faster network"
    else:
        first = (
            f"set train.anchors lower (a batch is {flops / 1e12:,.2f} TFLOP, most of it for slots), "
            f"or add training nodes ({rates.trainer_node:,.0f} tokens/s each)"
        )
    ordered = sorted(limits.values())
    more = f"; up to {ordered[1] / ordered[0]:.1f} times as fast before something else limits" if len(ordered) > 1 else ""
    return f"first: {first}{more}"


def _notes(target: TargetShape, length: int, tokens: float | None, processes: int, reading: float | None) -> tuple[str, ...]:
    notes = [f"documents of {length} tokens" + ("" if tokens is not None else "; every token supervised"), f"target's sizes: {target.source}"]
    if reading is not None and tokens is None:
        notes.append(f"before training the target reads the corpus once, at {reading:,.0f} tokens/s; --tokens N: how long that takes")
    if processes > 1:
        notes.append(f"{processes} trainer processes; a drafter that is sharded (train.parallel) is counted in memory, not in time")
    return tuple(notes)


def _simulated(plan: Plan, recipe: Recipe, topology: Topology, length: int, seconds: float, failure_every: float | None) -> Plan:
    """The same run as events; documents bundled where an hour of them would be too many. Each group is a site, or all are one where trainers ask all."""
    names = [g.name for g in topology.groups]
    groups = [[name] for name in names] if recipe.hidden.feed.groups > 1 else [names]
    per_step = max(1, round(plan.step_tokens / length / len(groups)))
    expected = min(plan.limits.values()) / length * seconds
    bundle = max(1, min(math.ceil(expected / _UNITS), per_step))
    need = max(1, round(per_step / bundle))
    unit = per_step * length / need  # tokens
    low = recipe.hidden.feed.low_tokens or 2 * plan.step_tokens
    high = (recipe.hidden.feed.high_tokens or 2 * low) / len(groups)
    sites = []
    for group in groups:
        rates = tuple(plan.rates.server / unit for s in topology.servers if s.group in group)
        trainers = sum(1 for t in topology.trainers if t.group in group)
        sites.append(Site(rates, trainers * plan.rates.link / unit, max(need, int(high / unit)), need))
    outcome = Simulation(sites, plan.rates.step, failure_every=failure_every, seed=recipe.seed).run(seconds)
    rate = outcome.steps * need * len(sites) * unit / seconds
    return replace(plan, simulated=outcome, unit_documents=bundle, simulated_rate=rate)
