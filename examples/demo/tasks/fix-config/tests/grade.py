"""Loads the file with the sealed copy of the gateway and follows paths that the task does not show."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import gateway
import grading

PATHS = {
    "legacy": ["/api/v1/", "/api/v1/users", "/api/v1/v2/"],
    "backend": ["/api/", "/api/v2/users", "/api/v10/", "/api/v1"],
    "files": ["/static/", "/static/a/b.css"],
    "site": ["/", "/index.html", "/apiary", "/api", "/static", "/staticfiles", "/v1/api/"],
}
ADDRESSES = {"site": 9000, "backend": 9001, "legacy": 9002, "files": 9003}


def judge():
    try:
        config = gateway.load(grading.read_text("/app/gateway.toml", 64 * 1024))
    except gateway.ConfigError as error:
        raise grading.Failed(f"the gateway refuses the file: {error}") from None
    if config["listen"]["port"] != 8443 or config["listen"]["upstream_timeout_s"] != 30:
        raise grading.Failed("port or timeout is not the one asked for")
    for name, paths in PATHS.items():
        for path in paths:
            if gateway.find_upstream(config, path) != (name, f"127.0.0.1:{ADDRESSES[name]}"):
                raise grading.Failed(f"{path} does not go to {name}")
    return {"reward": 1}


grading.grade(judge)
