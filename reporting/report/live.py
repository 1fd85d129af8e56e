"""Serves the report of running runs to browsers of this machine. The page asks for news by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from reporting.report.page import report_page
from reporting.report.run_files import FILES, holds_run
from run_folder.lock import is_in_use
from utils.errors import in_one_line

HOST = "127.0.0.1"
_REST = 10.0  # pause after making a page, in multiples of that time: the run on this machine needs the processor


class LivePage:
    """The page of some runs, made again when their files have changed."""

    def __init__(self, folders: Sequence[Path], *, price_per_hour: float | None, say: Callable[[str], None]) -> None:
        """
        Args:
            say: prints a line: once for each run that is waited for, and once when it is there.
        """
        self.folders, self.price_per_hour, self.say = folders, price_per_hour, say
        self._lock = threading.Lock()
        self._marks: object = None
        self._page, self._tag, self._not_before = b"", "", 0.0
        self._waits_for: set[Path] = set()

    def say_changes(self) -> None:
        """Print which runs are missing, and which have come since. Only one thread may call this."""
        missing = {folder for folder in self.folders if not holds_run(folder)}
        for folder in self.folders:
            if folder in missing - self._waits_for:
                self.say(f"waiting for {folder}: no run is there yet")
            elif folder in self._waits_for - missing:
                self.say(f"{folder} is there")
        self._waits_for = missing

    def current(self) -> tuple[bytes, str]:
        """The page and its tag, which changes when the page does.

        Raises:
            OSError: if a file of a run cannot be read.
        """
        with self._lock:
            # Marks are taken before the files are read: a write meanwhile then makes the page anew.
            marks = [_mark(folder) for folder in self.folders]
            if marks != self._marks and time.monotonic() >= self._not_before:
                began = time.monotonic()
                page = report_page(self.folders, price_per_hour=self.price_per_hour, is_live=True)
                self._page, self._marks = page.encode(), marks
                self._not_before = time.monotonic() + _REST * (time.monotonic() - began)
                self._tag = f'"{sha256(self._page).hexdigest()[:32]}"'
            return self._page, self._tag


def _mark(folder: Path) -> object:
    """A value that changes once the run has written something, or has ended."""
    stats = [(folder / name).stat() if (folder / name).exists() else None for name in FILES]
    return [stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats], is_in_use(folder)


class ReportServer(ThreadingHTTPServer):
    """Answers GET / with the page, for browsers of this machine."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int) -> None:
        """
        Args:
            port: 0 takes a free one.

        Raises:
            OSError: if the port is taken.
        """
        self.page = page
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "report", ""

    def do_GET(self) -> None:
        # Against DNS rebinding: another site's name may lead here, but its page sends that name as Host.
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in (HOST, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, b"this server is for its own machine\n")
        if urlsplit(self.path).path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, b"the report is at /\n")
        try:
            page, tag = self.server.page.current()
        except Exception as error:  # said in the browser; the next request may work
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{in_one_line(error)}\n".encode())
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", tag)
        return self._answer(HTTPStatus.OK, page, tag)

    def _answer(self, status: HTTPStatus, body: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8" if tag else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""
