"""A server that is up at once and answers nothing: two processes, as SGLang has several."""

import argparse
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.startswith("/health"):
            self.do_POST()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        print("asked", self.path, flush=True)
        time.sleep(300)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a scheduler that hangs
        while True:
            time.sleep(1.0)

    def end(*_: object) -> None:
        os.kill(worker, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
