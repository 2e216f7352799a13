"""The gateway's routing: reads gateway.toml, checks it, says where a path goes."""

import os
import re
import sys
import tomllib


class ConfigError(Exception):
    """The configuration cannot be used."""


def load(text):
    """Parse and check; returns the configuration. Raises ConfigError."""
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error}") from None
    if not isinstance(config.get("listen"), dict) or not isinstance(config.get("upstreams"), dict):
        raise ConfigError("there must be tables [listen] and [upstreams]")
    for key, low, high in (("port", 1, 65535), ("upstream_timeout_s", 1, 600)):
        value = config["listen"].get(key)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"listen.{key} must be a whole number from {low} to {high}")
    for name, address in config["upstreams"].items():
        if not isinstance(address, str) or not re.fullmatch(r"[0-9.]+:[0-9]{1,5}", address):
            raise ConfigError(f"upstreams.{name} must be an address like 127.0.0.1:9000")
    routes = config.get("routes")
    if not isinstance(routes, list) or not routes:
        raise ConfigError("there must be [[routes]]")
    for route in routes:
        if not isinstance(route, dict) or not str(route.get("prefix", "")).startswith("/"):
            raise ConfigError("each of the routes needs a prefix that begins with /")
        if route.get("upstream") not in config["upstreams"]:
            raise ConfigError(f"route {route['prefix']} names an unknown upstream: {route.get('upstream')}")
    return config


def find_upstream(config, path):
    """(name, address) of the first route whose prefix matches, or None."""
    for route in config["routes"]:
        if path.startswith(route["prefix"]):
            return route["upstream"], config["upstreams"][route["upstream"]]
    return None


def main():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "gateway.toml"), encoding="utf-8") as file:
        text = file.read()
    try:
        config = load(text)
    except ConfigError as error:
        sys.exit(f"gateway: {error}")
    if sys.argv[1:2] == ["route"]:
        print(find_upstream(config, sys.argv[2]))


if __name__ == "__main__":
    main()
