"""The containers' health check: asks /health of the server beside it; needs nothing but Python.

python3 healthcheck.py            exit code 0 while the server is ready, else 1 and why
python3 healthcheck.py --alive    also 0 while it loads or drains: whether to leave it alone, not whether to send work
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0  # below the 5 s that the container's supervisor waits
ALIVE = ("ready", "starting", "draining")


def status(port: int) -> str:
    """The word that /health says. Raises OSError or HTTPException if nobody answers, ValueError if it is no JSON."""
    if not os.environ.get("PAGEMILL_TLS_CERT"):
        try:
            return ask("http", port)
        except (http.client.HTTPException, ConnectionResetError):
            pass  # somebody is there, and speaks HTTPS if the settings file says so
    return ask("https", port)


def ask(scheme: str, port: int) -> str:
    trusting = ssl.create_default_context()
    trusting.check_hostname = False  # the certificate is for the name that clients use
    trusting.verify_mode = ssl.CERT_NONE
    # never by way of a proxy
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
    )
    try:
        with opener.open(f"{scheme}://127.0.0.1:{port}/health", timeout=TIMEOUT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as refusal:  # 503 says why
        body = refusal.read()
    return str(json.loads(body)["status"])


def main(arguments: list[str]) -> int:
    port = int(os.environ.get("PAGEMILL_PORT") or 8000)
    try:
        word = status(port)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        print(f"no answer on port {port}: {error}")
        return 1
    print(word)
    return 0 if word == "ready" or (word in ALIVE and "--alive" in arguments) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
