"""A client of an OpenAI-compatible server, which waits and tries again where the fault may pass."""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from convert.progress import tell
from dflash_jax.errors import UserError, check

KEY = "OPENAI_API_KEY"
TRIES = 10
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds; each is twice the one before
TIMEOUT = 1200.0  # seconds of silence: a server says nothing until an answer is whole
SECONDS_BETWEEN_COMPLAINTS = 5.0
HINTS = {
    401: f"a key that it takes, in the environment variable {KEY}, is right",
    403: f"a key that it takes, in the environment variable {KEY}, is right",
    404: "the address that its clients use, as http://host:8000/v1, and a --model that it serves are right",
    400: "a --max-length that the server has room for, and the --target that it serves, are right",
}
OTHERWISE = "a server that takes completions of token ids is right"


class PassingError(Exception):
    """A fault that may be gone when it is tried again; `wait` is how long the server wants it to take."""

    def __init__(self, reason: object, wait: str | None = None) -> None:
        super().__init__(str(reason))
        self.wait = float(wait) if wait and wait.isdecimal() else 0.0


class Endpoint:
    """A server at a URL such as http://host:8000/v1; one without a path is taken to mean /v1. Many threads may ask."""

    def __init__(self, url: str) -> None:
        """Take the server's URL; nothing is asked of it yet.

        Raises:
            UserError: no URL of a server.
        """
        right = "a URL such as http://host:8000/v1 is right"
        try:
            parts = urllib.parse.urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise UserError(f"--endpoint {url}: {error}; {right}") from error
        check(known and not parts.query and not parts.fragment, f"--endpoint {url}: no server's URL; {right}")
        self._url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        self._complained = float("-inf")
        self._complaining = threading.Lock()

    def model(self, name: str | None) -> str:
        """Return the name of the model to ask: the one that is given, or the only one that is served.

        Raises:
            UserError: several are served, or the faults of `ask`.
        """
        if name is not None:
            return name
        reply = self.ask("/models")
        try:
            served = [str(model["id"]) for model in reply["data"]]
        except (LookupError, TypeError) as error:
            raise UserError(f"{self._url}/models: no list of models; --model NAME is right") from error
        check(
            len(served) == 1, f"--endpoint: it serves {', '.join(served) or 'nothing'}; one of them as --model is right"
        )
        return served[0]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the first choice of a completion.

        Raises:
            UserError: a reply without one, or the faults of `ask`.
        """
        reply = self.ask("/completions", body)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise UserError(f"{self._url}/completions: a reply without a choice; {OTHERWISE}")
        return choices[0]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return what the server says, as often as that takes asking.

        Raises:
            UserError: it refuses, or is not there, or has no time, for minutes.
        """
        wait = FIRST_WAIT
        for left in reversed(range(TRIES)):
            try:
                return self._ask_once(self._url + path, body)
            except PassingError as error:
                check(left > 0, f"{self._url}{path}: {error}, {TRIES} times; a server that answers is right")
                pause = max(error.wait, wait * random.uniform(0.5, 1))  # not all of them at the same moment again
                self._complain(f"{self._url}{path}: {error}; trying again in {pause:.0f} s")
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError

    def _ask_once(self, url: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                said = f"{error.code} {error.reason}{_message(error)}"
                if error.code == 429 or error.code >= 500:
                    raise PassingError(said, error.headers.get("Retry-After")) from error
                raise UserError(f"{url}: {said}; {HINTS.get(error.code, OTHERWISE)}") from error
        except urllib.error.URLError as error:
            raise PassingError(getattr(error.reason, "strerror", None) or error.reason) from error
        except (OSError, http.client.HTTPException) as error:
            raise PassingError(error) from error
        except ValueError as error:
            raise UserError(f"{url}: a reply that is no JSON ({error}); {OTHERWISE}") from error

    def _complain(self, line: str) -> None:
        with self._complaining:
            if time.monotonic() - self._complained < SECONDS_BETWEEN_COMPLAINTS:
                return  # the others that wait have the same to say
            self._complained = time.monotonic()
        tell(line)


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says of a fault, in one of the forms that servers have for it."""
    try:
        said = error.read(4000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        value = json.loads(said)
        value = value.get("error", value)
        said = value["message"] if isinstance(value, dict) else str(value)
    except (ValueError, AttributeError, LookupError):
        pass  # as it is, then
    said = " ".join(str(said).split())[:300]
    return f" ({said})" if said else ""
