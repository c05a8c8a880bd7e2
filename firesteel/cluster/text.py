"""A plan as lines to read."""

from __future__ import annotations

from collections.abc import Iterator

from firesteel.cluster.costs import Memory
from firesteel.cluster.planner import Plan, Split

_ROWS = 8  # splits shown


def plan_lines(plan: Plan) -> Iterator[str]:
    """The whole plan, about thirty lines."""
    t, d, r = plan.target, plan.drafter, plan.rates
    sizes = f"{t.parameters / 1e9:,.1f}B parameters ({t.active / 1e9:,.1f}B a token), {t.weight_bytes / 1e9:,.1f} GB"
    yield f"target: {t.name}, {sizes}, multiplied in {t.precision}"
    yield f"drafter: {d.trained / 1e9:,.3f}B trained parameters, blocks of {d.block}, {d.captured} captured layers"
    yield _server(plan)
    yield f"memory of a server's accelerator: {_memory(plan.server_memory)}"
    yield f"memory of a trainer's accelerator: {_memory(plan.trainer_memory)}"
    yield f"hidden states: {plan.state_bytes / 1e3:,.1f} KB a token, {plan.rate * plan.state_bytes / 1e9:,.3f} GB/s at the rate below"
    yield ""
    yield f"{'tokens/s':>12}  {'of all':>12}"
    yield f"{r.server:>12,.0f}  {plan.limits['servers']:>12,.0f}  a server reads"
    yield f"{r.link:>12,.0f}  {plan.limits['links']:>12,.0f}  a training node's network takes in"
    step = f"({r.step:.3g} s a step of {plan.step_tokens:,.0f} tokens)"
    yield f"{r.trainer_node:>12,.0f}  {plan.limits['trainers']:>12,.0f}  a training node learns {step}"
    if "machine" in plan.limits:
        yield f"{'':>12}  {plan.limits['machine']:>12,.0f}  one machine does both, in turn"
    yield f"bottleneck: {plan.bottleneck}: {plan.rate:,.0f} tokens/s, {plan.rate / plan.step_tokens:.3g} steps/s"
    yield from _split_lines(plan)
    if plan.hours is not None and plan.tokens is not None:
        steps = plan.tokens / plan.step_tokens
        reading = f" ({plan.before:,.2f} of them reading the corpus once, before training)" if plan.before else ""
        yield f"time: {plan.tokens:,.0f} tokens, {steps:,.0f} steps, take {plan.hours:,.2f} hours{reading}, {plan.hours * plan.nodes:,.2f} node-hours"
    else:
        hours = 1e9 / plan.rate / 3600
        yield f"time: a billion tokens take {hours:,.2f} hours, {hours * plan.nodes:,.2f} node-hours (--tokens N: those of your corpus)"
    yield from _simulation_lines(plan)
    yield plan.advice
    yield from (f"note: {text}" for text in plan.notes)


def _server(plan: Plan) -> str:
    n, kind = plan.server_nodes, plan.kinds[0]
    if n is None:
        return f"a server of this target fits into no number of {kind} accelerators"
    planned = f"{plan.accelerators} accelerator{'s' if plan.accelerators > 1 else ''}"
    return f"a server needs {n} node{'s' if n > 1 else ''} of kind {kind}; planned: {planned}"


def _memory(m: Memory) -> str:
    parts = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in m.parts.items())
    return f"{m.needed / 1e9:,.1f} of {m.room / 1e9:,.1f} GB ({parts}): {'fits' if m.fits else 'DOES NOT FIT'}"


def _split_lines(plan: Plan) -> Iterator[str]:
    if plan.best is None:
        return
    b = plan.best
    yield f"one training node keeps up with {plan.balance:,.1f} inference nodes"
    yield f"best use of {plan.nodes} nodes: {_split(b)}"
    here = [s for s in plan.splits if s != b]
    step = max(1, len(here) // _ROWS)
    for s in here[::step][:_ROWS]:
        yield f"    {_split(s)}"


def _split(s: Split) -> str:
    return f"{s.inference:>4} inference + {s.training:>4} training ({s.inference / s.training:.2g}:1)  {s.rate:>12,.0f} tokens/s, trainers busy {s.busy:.0%}"


def _simulation_lines(plan: Plan) -> Iterator[str]:
    o = plan.simulated
    if o is None:
        return
    bundled = f", {plan.unit_documents} documents a unit" if plan.unit_documents > 1 else ""
    share = plan.simulated_rate / plan.rate
    yield f"simulated, {o.seconds:,.0f} s{bundled}: {plan.simulated_rate:,.0f} tokens/s ({share:.0%} of the formula), {o.steps:,} steps"
    yield f"    trainers wait {o.waited:.1%} of the time (queue empty), servers pause {o.full:.1%} (queue full), busiest link {o.link_busy:.1%}"
    if o.down > 0:
        yield f"    servers are down {o.down:.1%} of the time, {o.lost:,} of {o.made:,} units are lost with them and made again"
