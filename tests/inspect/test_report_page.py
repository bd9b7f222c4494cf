"""The page in a real browser: it can be searched and unfolded, is legible, needs no network, and runs nothing that a
name in a recording says."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recordings
import torch
from browser import Browser, Tab, browser, find_browser

from mainspring.graphs import CpuGraph, GraphError, Recording
from mainspring.inspect import Inspection, compare_rungs, render_page

COMMAND = find_browser()
needs_browser = pytest.mark.skipif(COMMAND is None, reason="no Chromium")
#: Where screenshots are kept: the folder that CI names, if it does.
ARTIFACTS = Path(os.environ.get("MAINSPRING_ARTIFACTS") or tempfile.gettempdir(), "mainspring-inspect")

LIGHTNESS = """(colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
  .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)"""
#: Every element that shows text of its own: its font size in pixels, contrast and text.
TEXTS = f"""(() => {{
  const light = {LIGHTNESS};
  const ground = (element) => {{
    for (let at = element; at; at = at.parentElement) {{
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }}
    return "rgb(255, 255, 255)";
  }};
  const found = [];
  for (const element of document.querySelectorAll("body *")) {{
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest("script, svg, .skip")) continue;
    const style = getComputedStyle(element);
    const pair = [light(style.color), light(ground(element))].sort((a, b) => b - a);
    found.push([parseFloat(style.fontSize), (pair[0] + 0.05) / (pair[1] + 0.05), element.textContent.slice(0, 40)]);
  }}
  return found;
}})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(COMMAND or "", tmp_path_factory.mktemp("chromium")) as made:
        yield made


def show(chromium: Browser, folder: Path, *inspections: Inspection) -> Tab:
    page = folder / "report.html"
    page.write_text(render_page(inspections), encoding="utf-8")
    return chromium.open(page.as_uri())


def names(tab: Tab) -> list[str]:
    """The operations that a person sees."""
    return tab.run(
        "[...document.querySelectorAll('.op')].filter((row) => row.checkVisibility())"
        ".map((row) => row.querySelector('.name').textContent)"
    )


def search(tab: Tab, text: str) -> None:
    tab.run("document.querySelector('#search').value = document.querySelector('#operation-count').textContent = ''")
    tab.run("document.querySelector('#search').focus()")
    if text:
        tab.type(text)
        tab.wait_for("document.querySelector('#operation-count').textContent.includes('match')")
    else:
        tab.run("document.querySelector('#search').dispatchEvent(new Event('input'))")
        tab.wait_for("document.querySelector('#operation-count').textContent.endsWith(' operations')")


@needs_browser
def test_layers_are_folded_into_one_line_that_unfolds_by_keyboard(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    assert names(tab) == ["embed_kernel", "sample_kernel"]
    tab.run("document.querySelector('details.section > summary').focus()")
    tab.press("Enter")
    tab.wait_for("document.querySelectorAll('details.layer').length === 4")
    assert names(tab) == ["embed_kernel", "norm_kernel", "qkv_kernel", "down_kernel", "reduce_kernel", "sample_kernel"]
    tab.run("document.querySelector('#unfold').click()")
    assert len(names(tab)) == 18
    tab.run("document.querySelector('#unfold').click()")
    assert len(names(tab)) == 2
    assert tab.complaints == []


@needs_browser
def test_an_operation_opens_to_its_grid_its_edges_and_its_addresses(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    search(tab, "#6")
    tab.run("document.querySelector('.op').unfold()")
    text = tab.run("document.querySelector('.op .inner').textContent")
    for shown in ("8 x 1 x 1", "128 x 1 x 1", "#5 (programmatic: PDL)", "model.layers.1.qkv.weight", "float32[1, 4]"):
        assert shown in text
    assert f"{recordings.inspection().recording.rung(1).operations[6].uses[0].address:#x}" in text


@needs_browser
def test_the_search_finds_kernels_buffers_and_shapes(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    search(tab, "LAYERS.2 qkv")
    assert names(tab) == ["qkv_kernel"]
    assert tab.run("document.querySelector('#operation-count').textContent") == "1 of 18 operations match"
    assert (
        tab.run("[...document.querySelectorAll('.op mark')].map((mark) => mark.textContent).join()").count("qkv") == 2
    )
    search(tab, "reduce_kernel")
    assert names(tab) == ["reduce_kernel"] * 4
    search(tab, "nothing of that name")
    assert names(tab) == []
    search(tab, "")
    assert names(tab) == ["embed_kernel", "sample_kernel"]
    tab.run("document.querySelector('#rung').value = '3'")
    tab.run("document.querySelector('#rung').dispatchEvent(new Event('change'))")
    search(tab, "float32[8,")
    assert len(names(tab)) == 18
    tab.run("document.querySelector('#owner-search').focus()")
    tab.type("layers.3")
    shown = "[...document.querySelectorAll('#owners tbody tr')].filter((row) => row.checkVisibility())"
    assert tab.run(f"{shown}.map((row) => row.dataset.name)") == [
        f"model.layers.3.{p}" for p in ("down.weight", "norm.weight", "qkv.weight")
    ]
    assert tab.complaints == []


@needs_browser
def test_names_are_text_and_nothing_else(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    tab.run("document.querySelector('#unfold').click()")
    tab.run("for (const row of document.querySelectorAll('.op')) row.unfold()")
    tab.run("document.querySelector('#timeline-canvas').focus()")
    tab.press("ArrowRight")
    assert tab.run("window.pwned === undefined && document.images.length === 0 && document.scripts.length === 2")
    assert tab.run("document.querySelector('h1').textContent").strip() == f"toy {recordings.NASTY}"
    assert tab.run("document.querySelector('.findings tbody th').textContent") == recordings.NASTY
    assert tab.complaints == []


@needs_browser
def test_it_asks_for_nothing_but_itself(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    assert [url.rpartition("/")[2] for url in tab.requested] == ["report.html"]
    refused = "fetch('data:text/plain,x').then(() => 'sent', () => 'refused')"
    assert tab.run(refused) == "refused"  # by the page's own policy
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.head.append(s);"
    assert tab.run(f"(() => {{ {script} return window.ran === undefined; }})()")


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_on_a_telephone_and_on_a_desk(chromium: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    tab = show(chromium, tmp_path, recordings.inspection(sizes=(1, 2, 4, 8, 16)))
    tab.resize(width)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.run("document.querySelector('details.section').unfold()")
    tab.run("document.querySelector('.op').unfold()")
    assert tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    # What does not fit scrolls in a box of its own, or is broken: nothing is cut off by the window.
    beyond = (
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, svg') && e.getClientRects().length"
    )
    assert (
        tab.run(f"{beyond} && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 80))") == []
    )
    texts = tab.run(TEXTS)
    assert len(texts) > 100
    assert [text for text in texts if text[0] < 12] == []
    assert [text for text in texts if text[1] < 4.5] == []
    tab.screenshot(ARTIFACTS / f"report-{width}-{scheme}.png")
    assert tab.complaints == []


@needs_browser
def test_every_control_is_reached_by_tab_and_has_a_name(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    reached = []
    for _ in range(80):
        tab.press("Tab")
        reached.append(tab.run("(document.activeElement.id || document.activeElement.tagName)"))
    wanted = {"rung", "search", "unfold", "owner-search", "zoom-in", "zoom-all", "timeline-canvas", "diff-a", "diff-b"}
    assert wanted <= set(reached)
    assert {"SUMMARY", "A", "INPUT"} <= set(reached)
    nameless = (
        "[...document.querySelectorAll('input, select, button, canvas, [tabindex]')].filter((e) => !(e.labels?.length"
        " || e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert tab.run(nameless) == []


@needs_browser
def test_the_timeline_tells_operations_and_the_gaps_behind_them(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    rows = tab.run(
        "[...document.querySelectorAll('#timeline tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert rows[0][:6] == ["eager", "270.0 µs", "120.0 µs", "150.0 µs (56 %)", "3", "3"]
    assert rows[1][:6] == ["graph", "120.0 µs", "120.0 µs", "0.0 µs (0 %)", "3", "–"]
    assert [row[:4] for row in rows if row[0] == "loop"] == [["loop", "120.0 µs", "–", "not seen"]]
    tab.run("document.querySelector('#timeline-canvas').focus()")
    tab.press("ArrowRight")
    read = "document.querySelector('#timeline-name').textContent"
    assert tab.run(read) == "eager · kernel_0 · 40.0 µs at 0 in step 1, then a gap of 60.0 µs"
    tab.press("ArrowRight")
    tab.press("ArrowDown")
    assert tab.run(read) == "eager · cudaLaunchKernel · 10.0 µs at 100.0 µs in step 1"


@needs_browser
def test_the_ladder_answers_for_any_batch_size(chromium: Browser, tmp_path: Path) -> None:
    tab = show(chromium, tmp_path, recordings.inspection())
    tab.run("document.querySelector('.ask input').value = 5")
    tab.run("document.querySelector('.ask input').dispatchEvent(new Event('input'))")
    assert (
        tab.run("document.querySelector('figcaption output').textContent") == "runs on rung 8: 3 rows of padding, 38 %"
    )
    titles = tab.run("[...document.querySelectorAll('.waste title')].map((t) => t.textContent)")
    assert titles[4] == "batch 5: 38 % padding" and len(titles) == 8


def counts(tab: Tab) -> list[tuple[str, int]]:
    rows = tab.run(
        "[...document.querySelectorAll('#diff-table tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    return [(row[0], int(row[1])) for row in rows]


@needs_browser
def test_two_rungs_are_compared_as_python_compares_them(chromium: Browser, tmp_path: Path) -> None:
    shown = recordings.inspection()
    tab = show(chromium, tmp_path, shown)
    diff = compare_rungs(shown.recording.rung(1), shown.recording.rung(8))
    assert counts(tab) == [(group.what, len(group.changes)) for group in diff.groups()] == [("changed", 4)] * 3
    summary = "document.querySelector('#diff-summary').textContent"
    assert tab.run(summary) == f"{len(diff.changes)} operations differ, {diff.same} are the same"
    tab.run("document.querySelector('#diff-b').value = '0'")
    tab.run("document.querySelector('#diff-b').dispatchEvent(new Event('change'))")
    assert tab.run(summary) == "The same 18 operations"


@needs_browser
def test_two_files_are_compared_rung_by_rung(chromium: Browser, tmp_path: Path) -> None:
    before, after = recordings.inspection(), recordings.inspection(layers=5)
    other = dataclasses.replace(after.recording, rungs=(recordings.rung(1, 5, last="other_kernel"),))
    tab = show(chromium, tmp_path, before, dataclasses.replace(after, recording=other))
    diff = compare_rungs(before.recording.rung(1), other.rung(1))
    told: dict[str, int] = {}
    for what, times in counts(tab):
        told[what] = told.get(what, 0) + times
    assert told == {"added": 5, "removed": 1}
    assert [change.what for change in diff.changes].count("added") == 5
    assert tab.complaints == []


@needs_browser
def test_one_graph_of_any_module_is_shown_without_a_ladder(chromium: Browser, tmp_path: Path) -> None:
    x, layer = torch.zeros(2, 4), torch.nn.Linear(4, 4)
    recording = Recording.of(CpuGraph.capture(lambda: layer(x).relu()))
    tab = show(chromium, tmp_path, Inspection(recording))
    assert names(tab) == [operation.name for operation in recording.rungs[0].operations]
    assert tab.run("document.querySelector('#diff').checkVisibility()") is False
    assert tab.complaints == []


def test_a_page_is_of_one_or_two_inspections() -> None:
    one: Any = recordings.inspection()
    with pytest.raises(GraphError, match="1 or 2 inspections, not 3"):
        render_page([one, one, one])
