"""Which weight change may follow which: terms, versions, digests."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.wire.inference import (
    ADMIN_ROUTES,
    DATA_ROUTES,
    STALE_TERM,
    ApplyRefusal,
    ApplyRequest,
    ServedPolicy,
    check_weights_directory,
    decode_request,
    is_stale,
)


def request(version: int, *, term: int = 1, digest: str | None = None) -> ApplyRequest:
    return ApplyRequest("demo", term, version, "weights/any", digest or f"digest-{version}")


changes = st.builds(request, st.integers(0, 5), term=st.integers(1, 4))


@pytest.mark.shows("I3", "SEC4")
@given(st.lists(changes, max_size=30))
def test_versions_never_go_back_within_a_term_and_terms_never_go_back(
    asked: list[ApplyRequest],
) -> None:
    served = ServedPolicy(run_id="demo", term=1, version=0, digest=None)
    history = [served]
    for change in asked:
        try:
            served.check(change)
        except ApplyRefusal:
            continue
        served = served.after(change)
        history.append(served)
    places = [(one.term, one.version) for one in history]
    assert places == sorted(places, key=lambda place: place[0])
    for before, after in itertools.pairwise(places):
        assert after[0] > before[0] or after[1] >= before[1]


@pytest.mark.shows("SEC4")
def test_what_is_served_may_be_asked_for_again_but_not_with_another_content() -> None:
    served = ServedPolicy("demo", 1, 2, "digest-2")
    served.check(request(2))
    assert served.is_current(request(2))
    with pytest.raises(ApplyRefusal, match="another digest"):
        served.check(request(2, digest="other"))


def test_initial_weights_may_be_replaced_by_a_published_version_zero() -> None:
    served = ServedPolicy("demo", 1, 0, None)
    served.check(request(0))
    assert not served.is_current(request(0))


@pytest.mark.shows("F16", "F58")
def test_another_run_is_refused() -> None:
    with pytest.raises(ApplyRefusal, match="serves run 'demo', not 'other'") as caught:
        ServedPolicy("demo", 1, 0, None).check(ApplyRequest("other", 1, 1, "x", "y"))
    assert caught.value.status == 409


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"run_id": 1}', b"\xff", b'{"version": 1e99}']
)
def test_anything_but_an_apply_request_gets_400(body: bytes) -> None:
    with pytest.raises(ApplyRefusal) as caught:
        decode_request(body, ApplyRequest)
    assert caught.value.status == 400


def test_an_apply_request_survives_the_wire_and_unknown_fields_do_not() -> None:
    body = msgspec.json.encode(request(3))
    assert decode_request(body, ApplyRequest) == request(3)
    with pytest.raises(ApplyRefusal):
        decode_request(body[:-1] + b',"extra":1}', ApplyRequest)


@pytest.mark.parametrize("directory", ["version_1", "a/b"])
def test_directories_inside_the_weights_pass(tmp_path: Path, directory: str) -> None:
    inside = tmp_path / "weights" / directory
    assert check_weights_directory(str(inside), tmp_path / "weights") == inside.resolve()


@pytest.mark.shows("SEC14")
@pytest.mark.parametrize("directory", [".", "..", "../secrets", "a/../../secrets", "/etc", "a\0b"])
def test_directories_elsewhere_are_refused(tmp_path: Path, directory: str) -> None:
    root = tmp_path / "weights"
    asked = directory if directory.startswith("/") else f"{root}/{directory}"
    with pytest.raises(ApplyRefusal) as caught:
        check_weights_directory(asked, root)
    assert caught.value.status == 403


def test_no_route_is_both_for_data_and_for_the_admin() -> None:
    assert not DATA_ROUTES & ADMIN_ROUTES


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ApplyRefusal(409, "your time is over", reason=STALE_TERM).body(), True),
        (ApplyRefusal(409, "this term is stale").body(), False),
        (b'{"error": {"message": "bread is stale"}}', False),
        (b"this is stale", False),
    ],
)
def test_a_newer_owner_is_known_by_the_reason_and_not_by_words(body: bytes, expected: bool) -> None:
    assert is_stale(body) is expected
