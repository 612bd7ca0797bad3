"""What several tests do with a site."""

from dataclasses import replace

from ingero.remediation.records import ActionState


def ask_back(site, action):
    site.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))


def give_back(site):
    (action,) = site.journal.actions()
    ask_back(site, action)
    site.poll(3, [])
    assert site.drained == set()
