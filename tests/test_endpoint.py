import collections
import contextlib
import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from convert.load import load_tokenizer
from dflash_jax.errors import UserError
from tests import pair
from training import endpoint, regenerate
from training.completions import closing_stop
from training.endpoint import Endpoint


class Stub(http.server.ThreadingHTTPServer):
    """A server of the tiny target. `faults` are given before anything else; `choice` makes an answer of a request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.models = ["tiny"]
        self.faults: collections.deque[Any] = collections.deque()
        self.asked = []
        self.choice = with_ids
        self.busy = self.busiest = 0
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.server
        with stub.lock:
            stub.asked.append((self.path, dict(self.headers), body))
            fault = stub.faults.popleft() if stub.faults else None
            stub.busy += 1
            stub.busiest = max(stub.busiest, stub.busy)
        says = fault or (200, {"choices": [stub.choice(body)]})
        with stub.lock:
            stub.busy -= 1  # before the client hears, who may ask again at once
        with contextlib.suppress(OSError):  # a client that was killed does not listen
            if says == "hang up":
                self.connection.close()
            else:
                self.reply(*says)

    def reply(self, status, value, headers=()):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def with_ids(body):
    return {"token_ids": [*body["prompt"][-2:], pair.STOP], "text": "…", "finish_reason": "stop"}


@pytest.fixture
def stub():
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.02)
    monkeypatch.delenv(endpoint.KEY, raising=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(pair.write_target(tmp_path_factory.mktemp("pair") / "target"))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [7, 9, i % 200]}) + "\n" for i in range(60)))
    return str(path)


@pytest.fixture
def arguments(target, data, stub, tmp_path):
    given = {"--target": target, "--data": data, "--output": str(tmp_path / "out.jsonl"), "--endpoint": stub.url}
    given |= {"--max-length": "200", "--max-new-tokens": "20"}
    return [word for pair_ in given.items() for word in pair_]


@pytest.fixture
def ask(arguments, tmp_path):
    """Run the command against the stub; return the lines it wrote."""

    def run(*more):
        regenerate.main([*arguments, *map(str, more)])
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


def test_it_asks_for_what_the_target_would_say_and_nothing_of_the_servers_own(ask, stub):
    (line,) = ask("--num-prompts", 1, "--temperature", 0.7, "--top-p", 0.8)
    assert (line["response_ids"], line["finish_reason"]) == ([9, 0, pair.STOP], "stop")
    assert (line["model"], line["dtype"]) == ("tiny", None)
    ((path, headers, body),) = stub.asked
    assert path == "/v1/completions"
    assert "Authorization" not in headers
    assert 0 <= body.pop("seed") < 2**31
    assert body == {
        "model": "tiny",
        "prompt": [7, 9, 0],
        "max_tokens": 20,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [pair.STOP],
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def test_answers_come_in_the_order_of_the_rows_and_no_more_at_a_time_than_asked(ask, stub):
    def slow_first(body):
        time.sleep(0.1 if body["prompt"][-1] % 10 == 0 else 0.002)
        return with_ids(body)

    stub.choice = slow_first
    lines = ask("--concurrency", 5)
    assert [line["response_ids"][1] for line in lines] == list(range(60))
    assert 2 <= stub.busiest <= 5


def test_seeds_tell_requests_apart_and_are_the_same_again(ask, stub, data, tmp_path):
    with open(data, "w") as rows:
        rows.write('{"prompt_ids": [7]}\n' * 4)
    ask()
    seeds = {body["seed"] for _, _, body in stub.asked}
    assert len(seeds) == 4
    stub.asked.clear()
    whole = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text("".join(whole.splitlines(keepends=True)[:2]))
    ask()
    assert {body["seed"] for _, _, body in stub.asked} < seeds
    assert (tmp_path / "out.jsonl").read_text() == whole


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"text": "Zwölf", "finish_reason": "stop"}, [*pair.ANSWER_IDS[:6], pair.STOP]),
        ({"text": "Zwölf<|im_end|>", "finish_reason": "stop"}, [*pair.ANSWER_IDS[:6], pair.STOP]),
        ({"text": "Zwölf", "finish_reason": "length", "token_ids": None}, pair.ANSWER_IDS[:6]),
        ({"text": "", "finish_reason": "stop"}, [pair.STOP]),
        ({"text": "?", "finish_reason": "stop", "token_ids": [5, 6]}, [5, 6, pair.STOP]),
    ],
)
def test_without_token_ids_the_text_is_tokenized_and_the_stop_put_back(ask, stub, choice, ids, capsys):
    stub.choice = lambda body: choice
    (line,) = ask("--num-prompts", 1)
    assert line["response_ids"] == ids
    assert ("gives no token ids" in capsys.readouterr().err) == (choice.get("token_ids") is None)


def test_the_closing_stop_is_the_one_that_the_template_ends_an_answer_with(target):
    tokenizer = load_tokenizer(target)
    start = pair.STOP - 1
    assert closing_stop([start, pair.STOP], tokenizer) == pair.STOP
    assert closing_stop([5, start], tokenizer) == start
    assert closing_stop([5], tokenizer) == closing_stop([5, 6], None) == 5
    tokenizer.chat_template = None
    assert closing_stop([start, pair.STOP], tokenizer) == pair.STOP
    with pytest.raises(UserError, match="--target: it has no stop tokens"):
        closing_stop([], tokenizer)


def test_what_may_pass_is_tried_again(ask, stub, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "SECONDS_BETWEEN_COMPLAINTS", 0)
    busy = (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"})
    stub.faults.extend([busy, (500, b"oops"), "hang up", (503, {"message": "loading"}), busy])
    assert len(ask("--concurrency", 3)) == 60
    assert "/v1/completions: 429 Too Many Requests (slow down); trying again in 0 s" in capsys.readouterr().err


def test_a_server_may_say_how_long_to_wait(stub, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(endpoint.time, "sleep", waited.append)
    stub.faults.extend([(503, {}, {"Retry-After": "7"}), (503, {}, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"})])
    assert Endpoint(stub.url).complete({"prompt": [1, 2]})["finish_reason"] == "stop"
    assert waited[0] == 7
    assert waited[1] <= 0.02


def test_a_server_that_is_silent_is_asked_again(stub, monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT", 0.2)
    silent = [True]

    def choice(body):
        if silent:
            time.sleep(silent.pop() and 0.5)
        return with_ids(body)

    stub.choice = choice
    assert Endpoint(stub.url).complete({"prompt": [1, 2]})["token_ids"] == [1, 2, pair.STOP]
    assert len(stub.asked) == 2


def test_a_server_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr(endpoint, "TRIES", 3)
    with pytest.raises(UserError, match=r"^http://127\.0\.0\.1:9/v1/models: Connection refused, 3 times; a server"):
        Endpoint("http://127.0.0.1:9").model(None)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((400, {"error": {"message": "too\nlong"}}), r"completions: 400 Bad Request \(too long\); a --max-length"),
        ((401, {"detail": "no"}), rf'completions: 401 Unauthorized \(\{{"detail": "no"\}}\); .* {endpoint.KEY}'),
        ((404, {"error": "no such model"}), r"completions: 404 Not Found \(no such model\); the address"),
        ((418, b""), r"completions: 418 I'm a Teapot; a server that takes"),
        ((200, b"<html>"), "completions: a reply that is no JSON"),
        ((200, []), "completions: a reply without a choice"),
        ((200, {"choices": []}), "completions: a reply without a choice"),
        ((200, {"choices": [{"finish_reason": "abort"}]}), "an answer whose finish_reason is 'abort'"),
        ((200, {"choices": [{"finish_reason": "stop"}]}), "a reply without token_ids"),
        ((200, {"choices": [{"finish_reason": "length", "text": ""}]}), "an answer of nothing"),
    ],
)
def test_what_will_not_pass_is_told_in_one_line(ask, stub, fault, reason):
    stub.faults.append(fault)
    with pytest.raises(UserError, match=reason) as caught:
        ask("--num-prompts", 1)
    assert "\n" not in str(caught.value)
    assert len(stub.asked) == 1


def test_answers_before_a_fault_stay_and_are_gone_on_with(ask, stub, tmp_path):
    stub.choice = lambda body: {} if body["prompt"][-1] == 30 else with_ids(body)
    with pytest.raises(UserError, match="finish_reason is None"):
        ask()
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 30
    stub.choice = with_ids
    stub.asked.clear()
    assert [line["line"] for line in ask()] == list(range(1, 61))
    assert min(body["prompt"][-1] for _, _, body in stub.asked) == 30


def test_a_key_is_sent_where_there_is_one(ask, stub, monkeypatch):
    monkeypatch.setenv(endpoint.KEY, "secret")
    ask("--num-prompts", 1)
    assert stub.asked[0][1]["Authorization"] == "Bearer secret"


def test_the_model_is_named_where_several_are_served(ask, stub):
    stub.models = ["tiny", "other"]
    with pytest.raises(UserError, match=r"^--endpoint: it serves tiny, other; one of them as --model is right"):
        ask()
    assert ask("--num-prompts", 1, "--model", "other")[0]["model"] == "other"
    with pytest.raises(UserError, match="model is 'other' there and 'tiny' here"):
        ask("--num-prompts", 1, "--model", "tiny")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/", "http://127.0.0.1:{}/v1", "http://127.0.0.1:{}/v1/"]
)
def test_a_url_without_a_path_means_v1(stub, url):
    Endpoint(url.format(stub.server_port)).complete({"prompt": [1]})
    assert stub.asked[0][0] == "/v1/completions"


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:port", "http://h/v1?a=b"])
def test_what_is_no_servers_url_is_refused(url):
    with pytest.raises(UserError, match=r"--endpoint .*; a URL such as"):
        Endpoint(url)


def test_a_full_disk_is_told_and_the_run_goes_on_later(ask, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"^--output .*out\.jsonl: cannot be written \(File too large\); more room"):
            ask()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["line"] for line in ask()] == list(range(1, 61))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_command_that_is_ended_goes_on_to_the_same_bytes(ask, arguments, stub, tmp_path, number, status):
    ask()
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    output.unlink()
    hold = threading.Event()

    def some(body):
        if body["prompt"][-1] >= 20:
            hold.wait()
        return with_ids(body)

    stub.choice = some
    run = [sys.executable, "-m", "training.regenerate", *arguments]
    process = subprocess.Popen(run, stderr=subprocess.DEVNULL, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    while not output.exists() or output.read_bytes().count(b"\n") < 20:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=10) == status
    hold.set()
    assert output.read_bytes() == b"".join(whole.splitlines(keepends=True)[:20])
    ask()
    assert output.read_bytes() == whole
