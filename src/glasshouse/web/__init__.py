"""What the page and the API server share: addresses, connections, bodies, JSON, and a log."""

from glasshouse.web.address import host_headers, is_loopback, listen, url_host
from glasshouse.web.connection import MAX_HEADER_BYTES, http_config, read_body
from glasshouse.web.json import json_response, strict_loads, to_json
from glasshouse.web.log import Log

__all__ = [
    "MAX_HEADER_BYTES",
    "Log",
    "host_headers",
    "http_config",
    "is_loopback",
    "json_response",
    "listen",
    "read_body",
    "strict_loads",
    "to_json",
    "url_host",
]
