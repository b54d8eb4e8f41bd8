"""A ticket from within: its layers, its masks as pictures, and where the bytes of its file go."""

from __future__ import annotations

from typing import Any

from mptify.report.charts import Columns, columns, in_percent, in_short, number, parts_bar
from mptify.report.collect import Cut
from mptify.report.markup import Markup, joined, scrolling, table, tag
from mptify.report.mask_images import kernels_picture, mask_picture
from mptify.report.overview import in_bytes

__all__ = ["layers_section", "masks_section", "size_section"]

MOST_PICTURES, OPEN_TABLE, FEW_LAYERS = 400, 24, 60


# -- layers ----------------------------------------------------------------------------------------------------------------


def layers_section(cut: Cut) -> Markup:
    layers, binary = cut.summary.layers, cut.ticket.config.weight_bits == 1
    names = [layer.name for layer in layers]
    scale = "Gain" if binary else "Standard deviation of the frozen weights"
    by_filter = [(layer.sparsest_filter, layer.densest_filter) for layer in layers] if len(layers) <= FEW_LAYERS else []
    reach = [("the layer", "bar"), *([("its sparsest to its densest filter", "thin")] if by_filter else [])]
    bits = Columns(names, [layer.bits_per_weight for layer in layers], marks=[8 * layer.entropy_bytes / layer.count for layer in layers])
    drawn = [
        columns("Density", Columns(names, [layer.density for layer in layers], by_filter), in_percent, legend=reach),
        columns(scale, Columns(names, [layer.gain for layer in layers])),
        columns("Bits per weight of the mask", bits, legend=[("stored", "bar"), ("entropy", "stroke-mark")]),
        columns("Bytes of the mask", Columns(names, [float(layer.coded_bytes) for layer in layers]), in_short),
    ]
    listed = scrolling("Layers", _layer_table(cut))
    counted = f"{len(layers)} layers" if len(layers) > 1 else "The layer"
    if len(layers) > OPEN_TABLE:
        listed = tag("details", tag("summary", f"All {counted} in numbers"), listed)
    words = (
        f"{counted}, in the order in which the network has them. Point at a column for its layer’s name; the table has the same numbers."
    )
    return tag("section", tag("h2", "Layers"), tag("p", words), tag("div", *drawn, class_="charts"), listed, id="layers")


def _layer_table(cut: Cut) -> Markup:
    scale = "gain" if cut.ticket.config.weight_bits == 1 else "deviation"
    heads = ["", "layer", "shape", "kept", "density", "by filter", scale, "bits/weight", "entropy", "of it", "coded as"]
    rows = [
        (
            place + 1, layer.name, "×".join(map(str, layer.shape)), f"{layer.kept:,}", f"{100 * layer.density:.2f} %",
            f"{100 * layer.sparsest_filter:.0f}–{100 * layer.densest_filter:.0f} %", f"{layer.gain:.4g}", f"{layer.bits_per_weight:.4f}",
            f"{8 * layer.entropy_bytes / layer.count:.4f}",
            f"{100 * layer.coded_bytes / layer.entropy_bytes:.1f} %" if layer.entropy_bytes else "–", layer.coded_as,
        )
        for place, layer in enumerate(cut.summary.layers)
    ]  # fmt: skip
    return table(heads, rows, words=(1, 2, 10))


# -- size ------------------------------------------------------------------------------------------------------------------


def size_section(cut: Cut) -> Markup:
    """What each part of the file takes, beside what masks that only their densities were known of would take."""
    summary = cut.summary
    sizes = dict(cut.sections)
    sizes["description"] = summary.file_bytes - sum(sizes.values())
    parts = [(words, sizes[name], name) for name, words in _PARTS.items() if sizes.get(name)]
    bar = parts_bar([("the file", parts), ("n·H(kept/n)", [("entropy of the masks", summary.entropy_bytes, "entropy")])], in_bytes)
    rows: list[tuple[Any, ...]] = [
        (joined([tag("span", class_=f"key box {name}"), words]), f"{size:,}", f"{100 * size / summary.file_bytes:.2f} %")
        for words, size, name in parts
    ]
    rows += [
        ("the file", f"{summary.file_bytes:,}", "100.00 %"),
        (
            "n·H(kept/n), summed over the layers",
            f"{summary.entropy_bytes:,.0f}",
            f"{100 * summary.entropy_bytes / summary.file_bytes:.2f} %",
        ),
        ("its weights as float32", f"{4 * summary.weights:,}", f"{400 * summary.weights / summary.file_bytes:.2f} %"),
    ]
    share = f"{100 * summary.mask_bytes / summary.entropy_bytes:.2f} % of" if summary.entropy_bytes else "beside"
    words = (
        f"The masks take {summary.mask_bytes:,} bytes, {share} their entropy n·H(kept/n): what they would take if nothing but each "
        "layer’s density were known. Less is possible where the first scores, which the seed brings back, tell which weights were "
        "likely to stay."
    )
    listed = scrolling("Sizes", table(["part", "bytes", "of the file"], rows))
    return tag("section", tag("h2", "Size against entropy"), tag("p", words), tag("div", bar, class_="size"), listed, id="size")


_PARTS = {
    "masks": "masks, entropy-coded",
    "signs": "signs of the survivors",
    "values": "values of the survivors",
    "floats": "norms and other floats",
    "gains": "gains, one per layer",
    "description": "description: settings, names, notes",
}


# -- masks -----------------------------------------------------------------------------------------------------------------


def masks_section(cut: Cut) -> Markup:
    """The first layer's kernels one by one if it sees images, and each layer's mask as a picture."""
    layers = list(cut.ticket.layers.values())
    drawn = [_mask(layer, len(layers)) for layer in layers[:MOST_PICTURES]]
    words = (
        "One picture per layer: filters downwards, the weights of each (input channels × taps) to the right. A cell is as deep a blue as "
        "its share that survives, in 16 shades; where a cell stands for a block of weights, the deepest one sets the scale."
    )
    left = len(layers) - len(drawn)
    more = tag("p", f"… and {left:,} layers more, which are not drawn.") if left else None
    grid = tag("div", *drawn, class_="masks-grid")
    return tag("section", tag("h2", "Masks"), tag("p", words), grid, more, _kernels(cut), id="masks")


def _kernels(cut: Cut) -> Markup | None:
    layer = next(iter(cut.ticket.layers.values()))
    picture = kernels_picture(layer, cut.ticket.config)
    if picture is None:
        return None
    which = f"the first {picture.shown} of {layer.shape[0]} filters" if picture.shown < layer.shape[0] else f"all {picture.shown} filters"
    channels = "" if layer.shape[1] == 1 else f", {layer.shape[1]} kernels each, one per channel"
    shade = "" if cut.ticket.config.weight_bits == 1 else "; larger ones are darker"
    about = (f"{layer.name}: {which}{channels}. ", tag("span", "+", class_="plus"), " in blue, ", tag("span", "−", class_="minus"),
             f" in orange, pruned weights grey{shade}.")  # fmt: skip
    image = tag("img", src=picture.address, width=picture.width, height=picture.height, alt=f"Kernels of {layer.name}, {which}")
    return tag("figure", tag("h3", "Kernels of the first layer"), tag("p", *about), image, class_="kernels")


def _mask(layer: Any, layers: int) -> Markup:
    picture = mask_picture(layer, layers)
    down, right = picture.block
    scale = "" if (down, right) == (1, 1) else f"; a cell is {down} × {right}, the deepest {in_percent(round(picture.darkest, 4))}"
    share = f"{number(100 * layer.kept / layer.size)} % kept"
    image = tag(
        "img", src=picture.address, width=picture.width, height=picture.height, loading="lazy", alt=f"Mask of {layer.name}, {share}"
    )
    shape = "×".join(map(str, layer.shape))
    return tag("figure", image, tag("figcaption", tag("b", layer.name), f" {shape}, {share}{scale}"))
