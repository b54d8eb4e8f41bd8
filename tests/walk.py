"""A browser walks the built docs: every page by the links between them, in light, dark and a phone's width.

    pip install playwright && mkdocs build -d site && python tests/walk.py site shots

Needs a chromium. Ends with 1 if a link leads nowhere, a page logs an error or asks for something from elsewhere, or is wider than a phone.
"""

import functools
import http.server
import sys
import threading
from pathlib import Path
from urllib.parse import urldefrag

from playwright.sync_api import sync_playwright

LOOKS = {"light": ("light", 1280, 900), "dark": ("dark", 1280, 900), "phone": ("light", 390, 844)}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder):
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def walk(page, start, faults):
    """All pages that can be reached from the first; and whether what links name is there."""
    waiting, seen, links = [start], {}, {}  # ids on each page; pages that each link is on
    while waiting:
        address = waiting.pop(0)
        if address in seen:
            continue
        seen[address] = set()
        answer = page.request.get(address)
        if answer.status != 200:
            faults.append(
                f"{links.get((address, ''), start)}: links to {address}, which answers {answer.status}"
            )
        elif "html" in answer.headers.get("content-type", ""):
            page.goto(address, wait_until="networkidle")
            seen[address] = set(
                page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
            )
            for link in page.evaluate(
                "[...document.querySelectorAll('a[href]')].map(one => one.href)"
            ):
                target, part = urldefrag(link)
                if target.startswith(start):
                    waiting.append(target)
                    links.setdefault((target, part), address)
    for (target, part), source in links.items():
        if part and seen[target] and part not in seen[target]:
            faults.append(f"{source}: links to {target}#{part}, which is not there")
    return [address for address, ids in seen.items() if ids], len(links)


def listen(page, start, faults):
    """Note what the browser complains of, and what pages want from elsewhere."""
    page.on(
        "console",
        lambda message: message.type == "error" and faults.append(f"{page.url}: {message.text}"),
    )
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    page.on(
        "request",
        lambda asked: (
            asked.url.startswith(("data:", start))
            or faults.append(f"{page.url}: asks for {asked.url}")
        ),
    )


def main(site, shots):
    start, faults = serve(site), []
    Path(shots).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for look, (colours, width, height) in LOOKS.items():
            page = browser.new_page(
                color_scheme=colours, viewport={"width": width, "height": height}
            )
            listen(page, start, faults)
            if look == "light":
                pages, links = walk(page, start, faults)
            for address in pages:
                name = address.removeprefix(start).strip("/").replace("/", "_") or "index"
                page.goto(address, wait_until="networkidle")
                page.screenshot(path=f"{shots}/{name}_{look}.png")
                wide = page.evaluate("document.documentElement.scrollWidth")
                if wide > width:
                    faults.append(f"{address}: {wide} pixels wide in a window of {width}")
            page.close()
        browser.close()
    print(
        f"{len(pages)} pages, {links} links, {len(faults)} faults", *sorted(set(faults)), sep="\n"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
