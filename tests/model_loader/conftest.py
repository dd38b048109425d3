import pytest


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Tests keep their conversions apart from the user's; the demo model stays where make demo put it."""
    if "real_model" not in request.keywords:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
