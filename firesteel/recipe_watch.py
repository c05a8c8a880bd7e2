"""The section `watch` of a recipe: what a run does about trouble when nobody looks. Taken from `firesteel.recipe`."""

from __future__ import annotations

from pydantic import Field

from firesteel.recipe_sections import Section


class Watch(Section):
    spike: float | None = Field(
        2.0, description="A step whose loss is more than this many times the median of the last 50 steps is not taken; empty takes every step.", gt=1
    )
    spikes: int = Field(
        5, description="Steps not taken (spikes, or not finite) among the last 50 after which training goes back to the last good state, at a lower rate.", ge=1
    )
    fall: float | None = Field(
        0.2,
        description="Training goes back as well when validation's acceptance length, less 1, falls by this share below the best; empty: never for that.",
        gt=0,
        lt=1,
    )
    rate: float = Field(0.5, description="Every return multiplies the learning rates by this.", gt=0, le=1)
    returns: int = Field(3, description="Returns after which the next trouble of this kind stops training, its last good state saved.", ge=0)
    starving: float = Field(0.5, description="Share of a minute that training may wait for samples before it is an alarm.", gt=0, le=1)
    slow: float = Field(3.0, description="A server that gives this many times fewer tokens a second than the others' median is an alarm.", gt=1)
    disk_states: float = Field(
        3.0, description="Free disk, in sizes of a training state, below which states are saved a quarter as often; with room for one, training stops.", ge=1.2
    )
    metrics_port: int | None = Field(
        None, description="Port of Prometheus metrics of a training process; further processes of a machine count up. Empty: none.", ge=1, le=65535
    )
    metrics_host: str = Field("127.0.0.1", description="Address of that port.")
