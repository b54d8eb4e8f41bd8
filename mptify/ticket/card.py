"""A model card for the Hugging Face Hub, from a ticket."""

from __future__ import annotations

import json
from typing import Any

from mptify.models import registry
from mptify.ticket.ticket_summary import TicketSummary

__all__ = ["hub_dataset", "model_card"]


def model_card(
    summary: TicketSummary, file: str, license: str | None = None, dataset: str | None = None
) -> str:
    """The text of a README.md, with figures from the ticket only.

    Args:
        ticket: The ticket.
        size: The size of its file in bytes.
        license: The licence to state.
        dataset: The id of a data set on the Hub; by default that of the search, where it is known.
    """
    return "\n".join([*_header(summary, license, dataset), *_page(summary, file)]) + "\n"


def hub_dataset(source: Any) -> str | None:
    """The Hub's id of the data that a search ran on, where it is known."""
    kind, _, place = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind in ("cifar10", "cifar100"):
        return f"uoft-cs/{kind}"
    name = place.partition(":")[0]
    return name.removeprefix("hfds/") if kind == "timm" and name.startswith("hfds/") else None


def _header(summary: TicketSummary, license: str | None, dataset: str | None) -> list[str]:
    task = (
        "image-classification"
        if summary.architecture is None
        else registry.hub_task(registry.resolve(summary.architecture))
    )
    lines = ["---", *([f"license: {_yaml(license)}"] if license else []), "library_name: mptify"]
    lines += [f"pipeline_tag: {task}"] if task else []
    lines += [
        "tags:",
        *(f"- {tag}" for tag in ("mptify", "lottery-ticket", "binary-neural-network", "sparsity")),
    ]
    if summary.architecture is not None and summary.architecture.startswith("timm:"):
        lines.append("- timm")
    data, accuracy = (
        dataset or hub_dataset(summary.notes.get("data")),
        summary.notes.get("accuracy"),
    )
    if data is not None:
        lines += ["datasets:", f"- {_yaml(data)}"]
    if task and data is not None and isinstance(accuracy, (int, float)):
        lines += [
            "model-index:",
            f"- name: {_yaml(_title(summary))}",
            "  results:",
            "  - task:",
            f"      type: {task}",
            "    dataset:",
            f"      name: {_yaml(data)}",
            f"      type: {_yaml(data)}",
            "    metrics:",
            "    - type: accuracy",
            f"      value: {round(accuracy, 6)}",
        ]
    return [*lines, "---", ""]


def _page(summary: TicketSummary, file: str) -> list[str]:
    config, size = summary.config, summary.file_bytes
    notes = [
        f"- {name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in summary.notes.items()
    ]
    origin = "given" if config["init"] == "keep" else "random, never trained"
    load = (
        f'model = mptify.load("{file}")'
        if summary.architecture
        else f'model = mptify.load("{file}", model=YourNetwork())'
    )
    return [
        f"# {_title(summary)}",
        "",
        f"A multi-prize ticket: of {summary.weights:,} {origin} weights, {summary.kept:,} survive "
        f"({100 * summary.kept / summary.weights:.1f} %); {_bits(config['bits'])}. "
        f"The file takes {size:,} bytes; the weights as float32 take {4 * summary.weights:,}.",
        "",
        "```python",
        "import mptify",
        "",
        load,
        "```",
        "",
        f"- network: {summary.architecture or 'a module of the author’s own'}",
        *(f"- {name}: {value}" for name, value in summary.arguments.items()),
        f"- settings: `{json.dumps(config, ensure_ascii=False)}`",
        *notes,
        f"- sha256 of the ticket: `{summary.digest}` (`mptify verify {file}` checks it)",
    ]


def _bits(bits: str) -> str:
    weight, activation = bits.split("/")
    return f"{weight} bit{'s' * (weight != '1')} per weight, {activation} per activation"


def _title(summary: TicketSummary) -> str:
    name = (summary.architecture or "ticket").rpartition(":")[2]
    pruned = 100 * (1 - summary.kept / summary.weights)
    return f"{name}, {summary.config['bits']} ticket, {pruned:.0f} % pruned"


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # every JSON string is a YAML string
