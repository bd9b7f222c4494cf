"""The page at / lets a person chat: it streams, works by keyboard, is legible, and runs nothing that a model says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from browser import Browser, Tab, browser, find_browser
from live_server import Live

COMMAND = find_browser()
NASTY = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script><b>&amp;</b>"
SHIFT = 8

pytestmark = pytest.mark.skipif(COMMAND is None, reason="no Chromium")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(COMMAND or "", tmp_path_factory.mktemp("chromium")) as made:
        yield made


def said(tab: Tab) -> list[list[str]]:
    """Who said what, as a person sees it."""
    turns = "[...document.querySelectorAll('.turn')]"
    return tab.run(f"{turns}.map((turn) => [turn.children[0].textContent, turn.children[1].textContent])")


def test_a_question_by_keyboard_is_answered_as_the_answer_comes(smol: Live, chromium: Browser) -> None:
    tab = chromium.open(smol.url)
    tab.wait_for("document.querySelector('#model').textContent === 'smollm2'")
    assert tab.run("document.activeElement.id") == "text"
    tab.run(
        "window.lengths = []; new MutationObserver(() => { const said = document.querySelector('.assistant .said');"
        " if (said) lengths.push(said.textContent.length); })"
        ".observe(document.querySelector('#log'), { childList: true, subtree: true, characterData: true })"
    )
    tab.type("Count from one")
    tab.press("Enter", SHIFT)
    tab.type("to ten, please.")
    assert tab.run("document.querySelector('#text').value") == "Count from one\nto ten, please."
    tab.press("Enter")
    tab.wait_for("window.lengths.length > 4")
    tab.press("Escape")
    tab.wait_for("!document.querySelector('#send').disabled")
    [question, answer] = said(tab)
    assert question == ["you", "Count from one\nto ten, please."]
    assert answer[0] == "model" and answer[1]
    lengths = tab.run("window.lengths")
    assert lengths == sorted(lengths) and len(set(lengths)) > 2  # it grew piece by piece
    assert tab.run("document.activeElement.id") == "text"
    assert tab.run("messages.map((message) => message.role)") == ["user", "assistant"]
    smol.wait_for(lambda: smol.is_idle)  # Escape ended the request, not only the display
    assert all(url.startswith(smol.url) for url in tab.requested)
    assert len(tab.requested) >= 3


def test_what_a_model_says_is_text_and_nothing_else(
    tiny_chat: Live, chromium: Browser, says: Callable[[str], None]
) -> None:
    says(NASTY)
    tab = chromium.open(tiny_chat.url)
    tab.type(NASTY)
    tab.press("Enter")
    tab.wait_for("messages.length === 2")
    assert said(tab) == [["you", NASTY], ["model", NASTY]]
    assert tab.run("window.pwned === undefined && document.querySelectorAll('#log img, #log script').length === 0")
    tab.run("document.querySelector('#clear').click()")
    assert said(tab) == [] and tab.run("messages.length") == 0


def test_the_browser_types_only_where_text_is_taken(tiny: Live, chromium: Browser) -> None:
    tab = chromium.open(tiny.url)
    tab.type("a")
    tab.run("document.activeElement.blur()")
    with pytest.raises(AssertionError, match="nothing that takes text"):
        tab.type("b")
    assert tab.run("document.querySelector('#text').value") == "a"


def test_a_refusal_is_shown_and_the_question_can_be_asked_again(tiny: Live, chromium: Browser) -> None:
    tab = chromium.open(tiny.url)
    tab.type("hello?")
    tab.press("Enter")
    tab.wait_for("document.querySelector('.fault') !== null && !document.querySelector('#send').disabled")
    assert "tokenizer" in said(tab)[-1][1]
    assert tab.run("messages.length") == 0


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_on_a_telephone_and_on_a_desk(tiny: Live, chromium: Browser, width: int, scheme: str) -> None:
    tab = chromium.open(tiny.url)
    tab.resize(width)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.run("show(turn('model', 'assistant'), 'word '.repeat(400) + 'x'.repeat(2000))")
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.run("parseFloat(getComputedStyle(document.querySelector('.said')).fontSize)") >= 16
    for control in ("#text", "#send", "#clear"):
        box = f"document.querySelector('{control}').getBoundingClientRect()"
        assert tab.run(f"{box}.left >= 0 && {box}.right <= innerWidth && {box}.bottom <= innerHeight"), control
    light = "(c) => c.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 :"
    light += " ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)"
    for part, ground in ((".said", "body"), ("#send", "#send"), (".who", "body")):
        ratio = tab.run(
            f"(() => {{ const light = {light}; const of = (s) => getComputedStyle(document.querySelector(s));"
            f" const pair = [light(of('{part}').color), light(of('{ground}').backgroundColor)].sort((a, b) => b - a);"
            " return (pair[0] + 0.05) / (pair[1] + 0.05); })()"
        )
        assert ratio >= 4.5, (part, ratio)


def test_every_control_is_reached_by_tab_and_has_a_name(tiny: Live, chromium: Browser) -> None:
    tab = chromium.open(tiny.url)
    reached = set()
    for _ in range(8):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "clear", "SUMMARY", "log"} <= reached
    assert tab.run("document.querySelector('label[for=text]').textContent.length > 0")


def test_a_server_may_be_without_a_page(serve_tiny: Callable[..., Live]) -> None:
    assert serve_tiny(page=False).get("/").status == 404
