"""Who may ask, and what answers say about themselves."""

from collections import Counter

import pytest
from starlette.datastructures import Headers

from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.app.serve.guards import Access, check_exposure
from edge0_ref.errors import UsageError
from tests.app.serve.servers import Server, stream


def status(access: Access, open_to_all: bool = False, **headers: str) -> int:
    try:
        access.check(Headers({"host": "127.0.0.1:8000"} | headers), open_to_all)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.spec("ENG-093")
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.7", True),
        ("[::1]:8000", True),
        ("here.example:1", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_a_name_the_server_does_not_know_is_refused(host, allowed) -> None:
    assert status(Access(hosts=["here.example"]), host=host) == (200 if allowed else 403)


@pytest.mark.spec("ENG-093")
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://friend.example", True),
        ("http://127.0.0.1:9000", False),
        ("https://evil.example", False),
        ("null", False),
        ("http://[::1", False),
        ("127.0.0.1:8000", False),
    ],
)
def test_pages_of_other_sites_are_refused(origin, allowed) -> None:
    assert status(Access(origins=["https://friend.example"]), origin=origin) == (200 if allowed else 403)


@pytest.mark.spec("ENG-093")
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic key", "Bearer key2", "Bearer kéy"])
def test_a_key_is_wanted(given) -> None:
    access = Access(key="key")
    assert status(access, authorization=given) == 401
    assert status(access, authorization="bearer key") == 200
    assert status(access, open_to_all=True, authorization=given) == 200


@pytest.mark.spec("ENG-093")
@pytest.mark.parametrize("key", ["ключ", "voilà", "\udcff"])
def test_a_key_is_the_bytes_that_were_given(key) -> None:
    sent = b"Bearer " + key.encode("utf-8", "surrogateescape")
    Access(key=key).check(Headers(raw=[(b"host", b"localhost"), (b"authorization", sent)]))
    with pytest.raises(ApiError, match="wants its API key"):
        Access(key=key).check(Headers(raw=[(b"host", b"localhost"), (b"authorization", sent[:-1])]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_alone_needs_no_key(host) -> None:
    check_exposure(host, None, no_auth=False)


@pytest.mark.spec("ENG-093")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "somewhere.example"])
def test_other_machines_need_one(host) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        check_exposure(host, None, no_auth=False)
    check_exposure(host, "key", no_auth=False)
    check_exposure(host, None, no_auth=True)


def test_no_site_is_invited(parrot: Server) -> None:
    """No header lets other pages read an answer, and refusals carry the same protection as answers."""
    fine = parrot.client.get("/healthz", headers={"Origin": parrot.url})
    foreign = parrot.client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert (fine.status_code, foreign.status_code) == (200, 403)
    for response in (fine, foreign):
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "without"),
    [
        ("/v1/models", 401),
        ("/v1/chat/completions", 401),
        ("/metrics", 401),
        ("/openapi.json", 401),
        ("/edge0/live", 401),
        ("/nothing/here", 401),
        ("/healthz", 200),
        ("/", 200),
        ("/page.js", 200),
    ],
)
def test_the_key_opens_all_but_health_and_the_page(strict: Server, path, without) -> None:
    assert strict.client.get(path, headers={"Authorization": "Bearer no"}).status_code == without


def test_metrics_are_what_prometheus_reads(parrot: Server) -> None:
    parrot.chat("to be counted")
    lines = parrot.client.get("/metrics").text.splitlines()
    names = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert typed == list(dict.fromkeys(names))
    assert all(float(line.rpartition(" ")[2]) >= 0 for line in lines if not line.startswith("#"))
    assert 'edge0_responses_total{path="/v1/chat/completions",status="200"}' in "\n".join(lines)


def responses_of(server: Server) -> Counter[str]:
    lines = server.client.get("/metrics").text.splitlines()
    counted = [line.removeprefix("edge0_responses_total").split() for line in lines if "responses_total{" in line]
    return Counter({labels: int(count) for labels, count in counted})


def test_every_response_is_counted(parrot: Server, strict: Server) -> None:
    before, refused = responses_of(parrot), responses_of(strict)
    parrot.chat("to be counted")
    stream(parrot, "/v1/completions", {"prompt": "to be counted"})
    for path in ("/", "/healthz", "/v1/models", "/v1/models/edge0", "/v1/models/none", "/v1/chat/completions", "/no"):
        parrot.client.get(path)
    strict.client.get("/v1/models", headers={"Authorization": "Bearer no"})
    strict.client.get("/v1/models", headers={"Host": "evil.example"})
    assert responses_of(strict) - refused == {
        '{path="/metrics",status="200"}': 1,
        '{path="other",status="401"}': 1,
        '{path="other",status="403"}': 1,
    }
    assert responses_of(parrot) - before == {
        '{path="/v1/chat/completions",status="200"}': 1,
        '{path="/v1/completions",status="200"}': 1,
        '{path="/",status="200"}': 1,
        '{path="/healthz",status="200"}': 1,
        '{path="/v1/models",status="200"}': 1,
        '{path="/v1/models/{name:path}",status="200"}': 1,
        '{path="/v1/models/{name:path}",status="404"}': 1,
        '{path="/v1/chat/completions",status="405"}': 1,
        '{path="other",status="404"}': 1,
        '{path="/metrics",status="200"}': 1,
    }
