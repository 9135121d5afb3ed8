"""A headless Chromium that tests control through its DevTools pipe, without a package for it."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_PATIENCE_S = 60


class Page:
    """A page of a browser; `errors` are its console's errors and its uncaught exceptions."""

    def __init__(self, commands, answers):
        self._commands, self._answers, self._buffer, self._number = commands, answers, b"", 0
        self._session, self.errors = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Return the result of a DevTools command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, url, width=1100, height=900):
        """Load a page in a window of the given size."""
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !!document.getElementById('links')")

    def run(self, script):
        """Return the value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script):
        """Wait until a JavaScript expression is true; return its value."""
        end = time.monotonic() + _PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return value

    def text(self, selector):
        return self.run(f"document.querySelector({selector!r}).innerText")

    def click(self, selector):
        self.run(f"document.querySelector({selector!r}).click()")

    def slide(self, selector, value):
        """Move a slider as user input does."""
        self.run(
            f"{{const s = document.querySelector({selector!r}); s.value = {value};"
            "s.dispatchEvent(new Event('input', {bubbles: true})); 0}"
        )

    def key(self, selector, name):
        """Press a key in a focused element."""
        self.run(f"document.querySelector({selector!r}).focus()")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def _read(self):
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], _PATIENCE_S)[0], "the browser is silent"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("text"))
        entry = params.get("entry", {})
        if event.get("method") == "Log.entryAdded" and entry.get("level") == "error":
            self.errors.append(entry["text"])
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))


@contextlib.contextmanager
def browser(folder):
    """Yield a page of a new browser, whose profile is in `folder`."""
    (to_browser, commands), (answers, from_browser) = os.pipe(), os.pipe()
    # The browser reads commands from file 3 and writes answers to file 4; the copies have higher
    # numbers than these.
    script = (
        "import os, sys, fcntl;"
        "copies = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]];"
        "os.dup2(copies[0], 3); os.dup2(copies[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
    ends = (to_browser, from_browser)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            script,
            *map(str, ends),
            CHROMIUM,
            *options,
        ],
        pass_fds=ends,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
