"""Fixtures of several files of this folder."""

import pytest


@pytest.fixture
def trainings(monkeypatch):
    """(model, plan) of every training of the test, in order."""
    from downstream.models.operators import quiet_libraries

    with quiet_libraries():
        from downstream.loop import running

    models_and_plans, train = [], running._train

    def recording(*arguments):
        models_and_plans.append((arguments[0], arguments[3]))
        return train(*arguments)

    monkeypatch.setattr(running, "_train", recording)
    return models_and_plans
