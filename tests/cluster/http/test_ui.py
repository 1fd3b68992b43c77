"""The page at /ui, in a browser, with a real API server and simulated pipelines. One browser for
all.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from activity_records import EndlessActivity
from browser import TIMEOUT_MS, LocalServer, browser
from playwright.sync_api import Browser, Page, Request, expect
from pydantic import SecretStr
from scripted_token_source import SAID, ScriptedSource, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.status_endpoints import ActivityEndpoint
from tramontane.proto.errors import OverloadedError, PipelineError
from tramontane.router.engine.activity_log import Activity

WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
KEY = "a-secret-key"

# How many pixels of a canvas have each of the page's colors.
COLORS = """canvas => {
  const probe = document.createElement("canvas").getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const wanted = {};
  for (const name of ["prefill", "decode", "idle"]) {
    probe.fillStyle = style.getPropertyValue("--" + name);
    probe.fillRect(0, 0, 1, 1);
    wanted[probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join()] = name;
  }
  const counts = {prefill: 0, decode: 0, idle: 0};
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const name = wanted[data.slice(i, i + 3).join()];
    if (name && data[i + 3] === 255) counts[name] += 1;
  }
  return counts;
}"""


@dataclass
class UiHarness:
    """A server, and a browser that looks at it; its requests, and its errors."""

    chromium: Browser
    activity: EndlessActivity = field(default_factory=lambda: EndlessActivity({"here-0": 3}))
    source: ScriptedSource = field(default_factory=ScriptedSource)
    complaints: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = ApiKeys(map(SecretStr, self.keys))
        self.server = LocalServer(
            http_app_for(
                self.source, keys=keys, extra_routes=ActivityEndpoint(self.activity.report).routes()
            ).app()
        )

    def page(self, **settings: Any) -> Page:  # playwright's own
        page = self.chromium.new_page(**{"viewport": WIDE} | settings)
        page.set_default_timeout(TIMEOUT_MS)
        page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text) if message.type == "error" else None
            ),
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))
        page.goto(f"{self.server.url}/ui")
        return page

    def answered_polls(self) -> int:
        """Wait for the answers to what the page has requested, and return how often it requested
        /activity.
        """
        polls = [each for each in list(self.requests) if "/activity" in each.url]
        for each in polls:
            each.response()
        return len(polls)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def ui(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[UiHarness]:
    made = UiHarness(chromium, keys=getattr(request, "param", ()))
    made.server.start()
    yield made
    for context in chromium.contexts:
        context.close()
    made.server.stop()


def _drawn(page: Page, *names: str) -> dict[str, int]:
    """As soon as there are pixels of all these colors."""
    page.wait_for_selector("canvas")
    drawn = (
        f"names => {{ const n = ({COLORS})(document.querySelector('canvas')); return"
        " names.every(name => n[name]); }"
    )
    page.wait_for_function(drawn, arg=names)
    counts: dict[str, int] = page.eval_on_selector("canvas", COLORS)
    return counts


def test_what_is_imagined_is_what_a_server_may_say() -> None:
    pipelines = asyncio.run(EndlessActivity({"here-0": 3}).report({}))
    assert (
        len(
            Activity.model_validate({"now": 0.0, "pipelines": pipelines}).pipelines[0].micro_batches
        )
        > 10
    )


def test_everything_is_drawn_and_nothing_comes_from_elsewhere(ui: UiHarness) -> None:
    page = ui.page()
    counts = _drawn(page, "prefill", "decode", "idle")
    assert min(counts.values()) > 500
    expect(page.locator(".stages li")).to_have_count(3)
    expect(page.locator(".stages li").first).to_contain_text("Stage 1/3")
    expect(page.locator(".stages li").first).to_contain_text("83%")
    assert page.locator(".stages meter").nth(1).evaluate("meter => meter.value") == pytest.approx(
        0.74
    )
    reported = page.locator(".figures").inner_text()
    for figure in (
        "1,235",
        "3 waiting",
        "182 ms",
        "p95 1.25 s",
        "none lately",
        "26%",
        "96 of 256 pages, 130 cached",
    ):
        assert figure in reported
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#state")).to_have_text("Live")
    expect(page.locator("#heat tbody tr").first).to_have_text(re.compile("0.*33%.*67%"))
    assert ui.complaints == []
    assert all(request.url.startswith(f"{ui.server.url}/") for request in ui.requests)


def test_it_requests_what_follows_and_shows_what_is_in_a_micro_batch(ui: UiHarness) -> None:
    page = ui.page()
    _drawn(page, "prefill")
    with page.expect_request(re.compile(r"/activity\?after=here-0%3A\d+$")):
        pass
    page.focus("canvas")
    for words in ("12 decodes;", "180 tokens of prompts and 8 decodes;", "480 tokens of prompts;"):
        for _ in range(12):  # every fifth is alike
            page.keyboard.press("ArrowLeft")
            if words in page.inner_text(".picked"):
                break
        expect(page.locator(".picked")).to_contain_text(words)
    page.keyboard.press("Escape")
    expect(page.locator(".picked")).to_contain_text("Point at")


def test_a_page_that_is_paused_stands_still_and_sends_no_requests(ui: UiHarness) -> None:
    page = ui.page()
    page.clock.install()
    _drawn(page, "prefill", "decode")
    page.click("#pause")
    expect(page.locator("#state")).to_have_text("Paused")
    polls = ui.answered_polls()
    page.clock.run_for(1000)  # what has been answered is drawn
    picture = "canvas => canvas.toDataURL()"
    before = page.eval_on_selector("canvas", picture)
    page.clock.run_for(60_000)
    assert ui.answered_polls() == polls
    assert page.eval_on_selector("canvas", picture) == before
    with page.expect_request(re.compile("/activity$")):  # not all of that minute is requested
        page.click("#pause")
    expect(page.locator("#state")).to_have_text("Live")


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_prompt_is_answered_as_the_tokens_come_and_can_be_stopped(
    ui: UiHarness, kind: str
) -> None:
    page = ui.page()
    page.locator(f"label:has(input[value={kind}])").click()
    ui.source.held_at = 3
    page.fill("#prompt", "What news?")
    page.click("#send")
    expect(page.locator("#answer")).to_have_text(re.compile(r"^\s*Good m$"))
    expect(page.locator("#send")).to_be_disabled()
    page.click("#stop")
    expect(page.locator("#answer-status")).to_contain_text("Stopped after")
    while ui.source.num_open:  # the server must not continue
        page.wait_for_timeout(10)
    ui.source.held_at = None
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#answer")).to_have_text(SAID)
    expect(page.locator("#answer-status")).to_contain_text("8 tokens, first after")
    assert ui.complaints == []


def test_a_thought_is_shown_in_a_block_of_its_own(ui: UiHarness) -> None:
    page = ui.page()
    deltas = [
        {"reasoning_content": "17 * 20", "reasoning": "17 * 20"},
        {"reasoning_content": " + 51"},
        {"content": "391"},
    ]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        re.compile("/v1/chat/completions$"),
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=stream),
    )
    page.locator("label:has(input[value=chat])").click()
    page.click("#send")
    expect(page.locator("#answer")).to_have_text("17 * 20 + 51391")
    expect(page.locator("#answer .thought")).to_have_text("17 * 20 + 51")


@pytest.mark.parametrize(
    ("failure", "fails_at", "said"),
    [
        (OverloadedError("too much waits", retry_after_s=1), 0, "Too much waits."),
        (PipelineError("stage 1 died"), 2, "Stage 1 died."),
    ],
)
def test_what_the_server_refuses_is_said_in_words(
    ui: UiHarness, failure: Any, fails_at: int, said: str
) -> None:
    ui.source.failure, ui.source.fails_at = failure, fails_at
    page = ui.page()
    page.click("#send")
    expect(page.locator("#answer-status")).to_have_text(said)
    expect(page.locator("#send")).to_be_enabled()


@pytest.mark.parametrize("ui", [(KEY,)], indirect=True)
def test_a_key_is_requested_and_kept_in_this_tab_alone(ui: UiHarness) -> None:
    page = ui.page()
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#watch")).to_be_hidden()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-status")).to_have_text("The server does not take this key.")
    assert ui.activity.requested == 0
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    _drawn(page, "prefill")
    page.reload()
    _drawn(page, "prefill")
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [
        0,
        "",
        f"{ui.server.url}/ui",
    ]
    page.click("#send")
    expect(page.locator("#answer")).to_have_text(SAID)
    page.click("#forget")
    expect(page.locator("#key")).to_be_focused()


def test_experts_are_shown_where_there_are_some(ui: UiHarness) -> None:
    page = ui.page()
    expect(page.locator("#heat tbody tr").nth(1)).to_have_text(re.compile("1.*100%.*0%"))
    assert page.eval_on_selector_all(".most", "cells => cells.map(cell => cell.textContent)") == [
        "67%",
        "100%",
    ]
    page.check("input[value=recent]", force=True)
    expect(page.locator("#heat tbody tr").nth(1)).to_have_text(re.compile("1.*–.*–"))
    none = {"error": {"message": "the model has no experts", "code": "no_experts"}}
    page.route("**/experts", lambda route: route.fulfill(status=404, json=none))
    expect(page.locator("#experts")).to_be_hidden()


def test_it_fits_a_phone_and_pipelines_are_below_one_another(ui: UiHarness) -> None:
    ui.activity.pipelines = {"here-0": 4, "here-1": 2}
    page = ui.page(viewport=PHONE, device_scale_factor=2, has_touch=True)
    _drawn(page, "prefill", "decode")
    first, second = (page.locator(".pipeline").nth(index).bounding_box() for index in range(2))
    assert first is not None
    assert second is not None
    assert second["y"] >= first["y"] + first["height"]
    expect(page.locator("#heat td")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    ui.activity.pipelines = {"here-1": 2}
    expect(page.locator(".pipeline")).to_have_count(1)


def test_a_dark_scheme_has_dark_colors(ui: UiHarness) -> None:
    page = ui.page(color_scheme="light")
    paint = (
        "[document.body, document.querySelector('.card')].map(each =>"
        " getComputedStyle(each).backgroundColor)"
    )
    _drawn(page, "prefill", "decode", "idle")
    light = page.evaluate(paint)
    page.emulate_media(color_scheme="dark")
    _drawn(page, "prefill", "decode", "idle")  # in the colors of this scheme
    dark = page.evaluate(paint)
    assert all(_brightness(a) > 200 > 60 > _brightness(b) for a, b in zip(light, dark, strict=True))


def _brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_a_server_that_went_away_is_missed_and_found_again(ui: UiHarness) -> None:
    page = ui.page()
    _drawn(page, "prefill")
    ui.server.stop()
    expect(page.locator("#trouble")).to_contain_text("The server does not answer. Trying again in")
    expect(page.locator("#state")).to_have_text("Server away")
    ui.activity.recoveries = 1
    ui.server.start_again()
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("Live")
    expect(page.locator(".facts")).to_have_text("3 stages · 1 recovery")


def test_a_hidden_tab_sends_no_requests(ui: UiHarness) -> None:
    page = ui.page()
    _drawn(page, "prefill")
    page.clock.install()
    show = (
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable:"
        " true}); %s }"
    )
    show %= "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(show, True)
    polls = ui.answered_polls()
    page.clock.run_for(60_000)
    assert ui.answered_polls() == polls
    with page.expect_request(re.compile("/activity$")):
        page.evaluate(show, False)
