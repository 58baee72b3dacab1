"""The page in headless Chromium: against the real server, and against a stand-in that sends what a model should not."""

import urllib.request

import pytest
from fake_server import POLICY, FakeServer
from selenium import webdriver
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

WAIT_S = 60  # generous: the machine may be slow and busy


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,800",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    driver.set_script_timeout(WAIT_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def server(api_server):
    return f"http://127.0.0.1:{api_server.port}/"


def until(browser, condition):
    return WebDriverWait(browser, WAIT_S, poll_frequency=0.05).until(condition)


def open_page(browser, url):
    browser.get_log("browser")  # forget what an earlier page said
    browser.get(url)
    until(browser, lambda b: b.find_element(By.ID, "model").text)


def ask(browser, text):
    """Sends a message and waits for the end of its answer."""
    before = len(browser.find_elements(By.CSS_SELECTOR, ".answer"))
    browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)
    until(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, ".answer[aria-busy=false]")) == before + 1)
    return browser.find_elements(By.CSS_SELECTOR, ".answer")[-1]


def complaints(browser):
    return [
        entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


# --- the real server ---------------------------------------------------------------------------------------------


def test_loads_clean(browser, server):
    open_page(browser, server)
    assert browser.title == "Tessera"
    until(browser, lambda b: b.find_element(By.ID, "live-state").text == "live")
    values = browser.find_elements(By.CSS_SELECTOR, "#live .value")
    assert values[0].text == "0" and values[1].text == "0", "nothing runs or waits"
    assert complaints(browser) == []


@pytest.mark.parametrize("path", ["", "app.js", "style.css"])
def test_policy(server, path):
    with urllib.request.urlopen(server + path, timeout=WAIT_S) as response:
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_chats_and_remembers(browser, server):
    open_page(browser, server)
    answer = ask(browser, "What is the capital of Portugal?")
    assert answer.find_element(By.CSS_SELECTOR, ".content").text == "The capital of Portugal is Lisbon."
    answer = ask(browser, "What is the capital of Japan?")
    assert "Tokyo" in answer.find_element(By.CSS_SELECTOR, ".content").text
    assert "tokens" in answer.find_element(By.CSS_SELECTOR, ".note").text
    until(
        browser, lambda b: "ms" in b.find_elements(By.CSS_SELECTOR, "#live .value")[3].text
    )  # time to first token
    browser.find_element(By.ID, "new-chat").click()
    assert browser.find_elements(By.CSS_SELECTOR, ".message") == []
    assert browser.find_element(By.ID, "empty").is_displayed()


def test_reasoning_is_folded(browser, server):
    open_page(browser, server)
    Select(browser.find_element(By.ID, "effort")).select_by_value("low")
    answer = ask(browser, "How much is 47 plus 38?")
    reasoning = answer.find_element(By.CSS_SELECTOR, "details.reasoning")
    text = reasoning.find_element(By.CSS_SELECTOR, ".reasoning-text")
    assert reasoning.is_displayed() and not text.is_displayed()
    reasoning.find_element(By.TAG_NAME, "summary").click()
    assert text.is_displayed() and "85" in text.text
    assert "85" in answer.find_element(By.CSS_SELECTOR, ".content").text


def test_tool_round_trip(browser, server):
    open_page(browser, server)
    browser.find_element(By.ID, "tools").click()
    answer = ask(browser, "What is the weather in Lisbon?")
    card = answer.find_element(By.CSS_SELECTOR, ".tool")
    assert card.find_element(By.CSS_SELECTOR, ".tool-name").text == "get_weather"
    assert '"city": "Lisbon"' in card.text
    result = answer.find_element(By.CSS_SELECTOR, ".results input")
    result.send_keys('{"weather": "sunny", "temperature": 21}', Keys.ENTER)
    until(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, ".answer[aria-busy=false]")) == 2)
    final = (
        browser.find_elements(By.CSS_SELECTOR, ".answer")[-1].find_element(By.CSS_SELECTOR, ".content").text
    )
    assert "sunny" in final and "Lisbon" in final


# --- a scripted server -------------------------------------------------------------------------------------------


def content(*pieces):
    return [{"content": piece} for piece in pieces]


def test_stop_ends_the_stream(browser):
    with FakeServer(content(*["word "] * 2000), pause_s=0.02) as fake:
        open_page(browser, fake.url)
        browser.find_element(By.ID, "prompt").send_keys("Go on.", Keys.ENTER)
        until(browser, lambda b: "word word" in b.find_element(By.CSS_SELECTOR, ".answer .content").text)
        browser.find_element(By.ID, "stop").click()
        until(browser, lambda b: b.find_elements(By.CSS_SELECTOR, ".answer[aria-busy=false]"))
        assert "stopped" in browser.find_element(By.CSS_SELECTOR, ".answer .note").text
        assert (
            browser.find_element(By.ID, "send").is_displayed()
            and not browser.find_element(By.ID, "stop").is_displayed()
        )
        until(browser, lambda _: fake.disconnects == 1)  # the server learns of it


HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'></svg><iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "</div></details><style>body { display: none }</style>",
    "[click](javascript:window.ran=1) [data](data:text/html,<script>1</script>) [c](JaVaScRiPt:window.ran=1)",
    "[spaces]( javascript:window.ran=1 ) <a href='javascript:window.ran=1'>a</a> [x](\tjavascript:window.ran=1)",
    "`<b>code</b>` **<i>bold</i>** ```<u>",
    "```html\n<script>window.ran = 1</script>\n```",
    "# <script>window.ran = 1</script>\n- <img src=x onerror=alert(1)>\n> <img src=x onerror=alert(2)>",
    '[t](https://example.com/" onmouseover="window.ran=1)',
    "\u202ertl \u0000nul \ud7ff {{constructor.constructor('window.ran=1')()}} ${window.ran=1}",
]


@pytest.mark.parametrize("cut", [1000, 3])
def test_hostile_output_is_text(browser, cut):
    text = "\n\n".join(HOSTILE)
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    call = {
        "index": 0,
        "id": "<b>",
        "type": "function",
        "function": {"name": HOSTILE[1], "arguments": '{"a": "%s"}' % HOSTILE[0]},
    }
    deltas = [{"reasoning_content": piece} for piece in pieces] + content(*pieces) + [{"tool_calls": [call]}]
    with FakeServer(deltas, finish="tool_calls") as fake:
        open_page(browser, fake.url)
        answer = ask(browser, "<script>window.ran = 1</script>")
        assert browser.execute_script("return window.ran") is None
        with pytest.raises(NoAlertPresentException):
            browser.switch_to.alert  # noqa: B018
        log = browser.find_element(By.ID, "log")
        assert (
            log.find_elements(
                By.CSS_SELECTOR,
                "script, img, svg, iframe, style, u, i, b, [onerror], [onload], [onmouseover]",
            )
            == []
        )
        links = [link.get_attribute("href") for link in log.find_elements(By.TAG_NAME, "a")]
        assert all(link.startswith("https://example.com/") for link in links), links
        assert HOSTILE[0] in answer.find_element(By.CSS_SELECTOR, ".content").text
        assert HOSTILE[1] in answer.find_element(By.CSS_SELECTOR, ".content").text
        assert answer.find_element(By.CSS_SELECTOR, ".tool-name").text == HOSTILE[1]
        assert browser.find_element(By.CSS_SELECTOR, ".bubble").text == "<script>window.ran = 1</script>"
        reasoning = answer.find_element(By.CSS_SELECTOR, ".reasoning-text").get_attribute("textContent")
        assert reasoning == text
        assert complaints(browser) == [], "the policy had nothing to stop"


def test_a_paragraph_without_end_is_plain_text(browser):
    text = "**strong** " + "*a " * 10_000  # marks that never close cost the square of the text
    pieces = [text[i : i + 1000] for i in range(0, len(text), 1000)]
    with FakeServer(content(*pieces, "\n\n**done**")) as fake:
        open_page(browser, fake.url)
        shown = ask(browser, "Go on.").find_element(By.CSS_SELECTOR, ".content")
        assert shown.find_element(By.TAG_NAME, "p").get_attribute("textContent") == text
        assert [strong.text for strong in shown.find_elements(By.TAG_NAME, "strong")] == ["done"]


@pytest.mark.parametrize("width", [360, 412])
def test_phone_width(browser, width):
    wide = ["unbroken" * 60, "\n\n```\n" + "code " * 60 + "\n```\n\n", "1. item\n2. item"]
    with FakeServer(content(*wide)) as fake:
        size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            open_page(browser, fake.url)
            ask(browser, "w" * 300)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert (
                browser.execute_script(
                    "const log = document.getElementById('log'); return log.scrollWidth - log.clientWidth"
                )
                <= 0
            )
            side = browser.find_element(By.ID, "side")
            assert not side.is_displayed()
            browser.find_element(By.ID, "side-toggle").click()
            assert side.is_displayed() and side.size["width"] <= width
            browser.switch_to.active_element.send_keys(Keys.ESCAPE)
            assert not side.is_displayed()
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_settings_reach_the_request(browser):
    with FakeServer(content("ok")) as fake:
        open_page(browser, fake.url)
        browser.find_element(By.ID, "system").send_keys("Be brief.")
        browser.find_element(By.ID, "max-tokens").send_keys("12")
        Select(browser.find_element(By.ID, "effort")).select_by_value("high")
        browser.find_element(By.ID, "temperature").send_keys(Keys.ARROW_RIGHT * 5)
        ask(browser, "Hello!")
        ask(browser, "Again.")
        body = fake.requests[-1]
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "Again."},
        ]
        assert (body["max_completion_tokens"], body["reasoning_effort"], body["temperature"]) == (
            12,
            "high",
            0.5,
        )
        assert body["stream"] is True and body["model"] == "fake"


def test_key_stays_in_the_tab(browser):
    with FakeServer(content("ok")) as fake:
        open_page(browser, fake.url)
        browser.find_element(By.ID, "api-key").send_keys("secret-key", Keys.TAB)
        ask(browser, "Hello!")
        assert browser.execute_script(
            "return [localStorage.length, document.cookie, sessionStorage['tessera.key']]"
        ) == [0, "", "secret-key"]
        assert fake.keys[-1] == "Bearer secret-key"
        assert "secret-key" not in str(fake.requests)


def test_every_field_has_a_label(browser):
    with FakeServer() as fake:
        open_page(browser, fake.url)
        unlabelled = browser.execute_script(
            "return [...document.querySelectorAll('input, select, textarea')].filter((f) => f.labels.length === 0).map((f) => f.id)"
        )
        assert unlabelled == []
        unnamed = browser.execute_script(
            "return [...document.querySelectorAll('button')].filter((b) => b.textContent.trim() === '').length"
        )
        assert unnamed == 0


def test_errors_are_shown(browser):
    with FakeServer(content("partial"), finish=None) as fake:
        open_page(browser, fake.url)
        answer = ask(browser, "Hello!")
        assert "ended before the answer" in answer.find_element(By.CSS_SELECTOR, "[role=alert]").text
        assert answer.find_element(By.CSS_SELECTOR, ".content").text == "partial"


def test_event_parser_for_every_cut(browser):
    """The same events, wherever the stream is cut and however its lines end."""
    with FakeServer() as fake:
        open_page(browser, fake.url)
        found = browser.execute_async_script("""
            const done = arguments[arguments.length - 1];
            import("./sse.js").then(({EventParser}) => {
              const wrong = [];
              for (const end of ["\\n", "\\r\\n", "\\r"]) {
                const text = [": ping", "", "data: one", "", "data:two", "data: three", "event: x", "", "", "data: [DONE]", "", ""].join(end);
                for (let a = 0; a <= text.length; ++a) for (let b = a; b <= text.length; ++b) {
                  const parser = new EventParser();
                  const events = [text.slice(0, a), text.slice(a, b), text.slice(b)].flatMap((piece) => parser.push(piece));
                  if (JSON.stringify(events) !== JSON.stringify(["one", "two\\nthree", "[DONE]"])) wrong.push([end, a, b, events]);
                }
              }
              done(wrong.slice(0, 3));
            }, (error) => done(String(error)));
            """)
        assert found == []
