"""Files of bearer tokens: their lines, and what is said of bad ones without repeating them."""

from pathlib import Path

import pytest

from cluster.tokens import Caller, TokenFile


def file_of(path: Path, text: str) -> TokenFile:
    path.write_text(text)
    return TokenFile(path, flag="--auth-token-file")


def test_a_line_is_a_token_its_tenant_and_the_tenant_s_limit(tmp_path: Path) -> None:
    tokens = file_of(
        tmp_path / "tokens", "# ours\n\nalpha  acme limit=3\nbeta\tacme\n  gamma limit=1\ndelta#x umbrella\n"
    )
    acme = Caller(tenant="acme", max_concurrent=3)
    assert [tokens.caller(token) for token in ("alpha", "beta")] == [acme, acme]
    assert tokens.caller("gamma") == Caller(tenant="default", max_concurrent=1)
    assert tokens.caller("delta#x") == Caller(tenant="umbrella")
    for unknown in ("", "alph", "alphaa", "Alpha", "#", "acme", "alph\udce4"):
        assert tokens.caller(unknown) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "has no tokens"),
        ("secret acme globex\n", r"line 1 is not `TOKEN \[TENANT\] \[limit=N\]`"),
        ("\nsecret limit=0\n", "line 2 is not"),
        ("secret limit=many\n", "line 1 is not"),
        ("secret limit=1 limit=2\n", "line 1 is not"),
        ("secret a/b\n", "line 1 is not"),
        ("secret acme=\n", "line 1 is not"),
        (f"secret {'a' * 65}\n", "line 1 is not"),
        ("secret acme\nsecret globex\n", "line 2: this token is in an earlier line too"),
        ("secret acme limit=1\nsecret2 acme limit=2\n", "one tenant has two limits, 1 and 2"),
        ("secr\u00e9t acme\n", "line 1: a token must be printable ASCII"),
    ],
)
def test_a_bad_line_is_named_and_its_token_is_not(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ValueError, match=message) as caught:
        file_of(path, text)
    assert str(caught.value).startswith(f"--auth-token-file {path}")
    assert not {"secret", "secr\u00e9t", "acme", "globex"} & set(str(caught.value).removeprefix(str(path)).split())


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--auth-token-file .*: No such file or directory"):
        TokenFile(tmp_path / "missing", flag="--auth-token-file")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        TokenFile(tmp_path / "binary", flag="--auth-token-file")


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    tokens = file_of(path, "alpha acme\n")
    path.write_text("beta acme\nalpha acme\n")
    assert tokens.caller("beta") == tokens.caller("alpha") == Caller(tenant="acme")
    path.write_text("gamma acme globex\n")
    assert tokens.caller("alpha") is not None
    assert tokens.caller("gamma") is None
    path.unlink()
    assert tokens.caller("beta") is not None
    path.write_text("gamma\n")
    assert [tokens.caller(token) is None for token in ("alpha", "beta", "gamma")] == [True, True, False]
    path.write_text("")
    assert tokens.caller("gamma") is None  # all of them revoked
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == 2
    assert not any("gamma" in line for line in logged)


def test_a_file_behind_a_link_that_is_moved_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes rotates a mounted secret."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").write_text(f"{name}\n")
    (tmp_path / "current").symlink_to("old")
    tokens = TokenFile(tmp_path / "current" / "tokens", flag="--auth-token-file")
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(tmp_path / "current")
    assert tokens.caller("old") is None
    assert tokens.caller("new") is not None


def test_names_of_tenants_requests_cannot_be_confused() -> None:
    acme, other, anyone = Caller(tenant="acme"), Caller(tenant="acme2"), Caller()
    assert len({caller.scoped("r/1") for caller in (acme, other, anyone)}) == 3
    assert acme.unscoped(acme.scoped("acme/r")) == "acme/r"
    assert anyone.unscoped("acme/r") == "acme/r"
