"""The file with what a host needs for its builds."""

from __future__ import annotations

import pytest

from dayfly.errors import ConfigError
from dayfly.images.builder import BuildSettings, load_settings


def test_the_settings_file_is_read_and_options_are_added(tmp_path, monkeypatch):
    file = tmp_path / "build.yaml"
    file.write_text("allow: [mirror.test]\nfiles: {ca.pem: certs/ca.pem}\nenv: {A: '1'}\nmemory_mb: 512\n")
    monkeypatch.setenv("DAYFLY_BUILD_SETTINGS", str(file))
    settings = load_settings().with_changes({"allow": ["10.0.0.1"], "env": {"B": "2"}, "network": "none"})
    assert settings.allow == ("mirror.test", "10.0.0.1")
    assert settings.env == {"A": "1", "B": "2"}
    assert settings.files == {"ca.pem": tmp_path / "certs/ca.pem"}
    assert settings.machine.memory_mib == 512 and settings.network == "none"


def test_without_a_file_the_defaults_hold(tmp_path, monkeypatch):
    monkeypatch.delenv("DAYFLY_BUILD_SETTINGS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings() == BuildSettings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("netwrok: none", "did you mean 'network'"),
        ("network: open", "network"),
        ("[1", "not YAML"),
        ("files: {a/b: c}", "no plain file name"),
        ("memory_mb: 1", "memory_mb"),
    ],
)
def test_mistakes_are_named(tmp_path, text, says):
    file = tmp_path / "build.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_named_file_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="do not exist"):
        load_settings(tmp_path / "none.yaml")
