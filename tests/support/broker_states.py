# SPDX-License-Identifier: LGPL-3.0-or-later
"""An instance as the broker module has it, without Flux, for the tests of what it decides."""

from __future__ import annotations

from dovetail.flux.instance.effects import Answer, Refuse, Submit, Watch
from dovetail.flux.instance.requests import REQUESTS, STREAMS
from dovetail.flux.instance.state import Instance


class Play:
    """An instance, and what it wanted done; requests have names as their keys."""

    def __init__(self, nodes=2):
        self.state = Instance(nodes, executor="kubernetes", up_timeout=120.0)
        self.done = []
        self.jobs = 100

    def do(self, effects):
        for effect in effects:
            self.done.append(effect)
            if isinstance(effect, Submit):
                self.jobs += 1
        return self

    def ask(self, topic, key, **payload):
        known = STREAMS if topic in ("attach", "follow") else REQUESTS
        return self.do(known[topic](self.state, key, payload))

    def begin(self, adopted=None):
        self.do(self.state.start(adopted or {}))
        for number in self.submits() if not adopted else ():
            self.do(self.state.submitted(number, 100 + number))
        return self

    def attach(self, number, **news):
        return self.ask("attach", f"agent{number}", number=number, rank=number, **news)

    def ready(self, *numbers):
        for number in numbers:
            self.attach(number)
            news = {"kubeconfig": "secret"} if number == 0 else {}
            self.ask("tell", f"t{number}", number=number, node=f"n{number}", **news)
        return self

    def over(self, number, status=0):
        """A slice's job ends, and its machine is found clean."""
        self.do(self.state.finished(number, status))
        self.do(self.state.swept(number, ""))
        return self.do(self.state.cleaned(number))

    def left(self, number):
        """An agent did as it was told."""
        self.ask("tell", "bye", number=number, ended="")
        self.do(self.state.drop({f"agent{number}"}))
        return self.over(number)

    def submits(self):
        return [effect.number for effect in self.done if isinstance(effect, Submit)]

    def told(self, key):
        """The answers to one request: values, or (code, why); not what is only to be kept."""
        found = []
        for effect in self.done:
            if isinstance(effect, Answer) and effect.key == key and "keep" not in effect.value:
                found.append(dict(effect.value))
            elif isinstance(effect, Refuse) and effect.key == key:
                found.append((effect.code, effect.why))
        return found

    def kept(self):
        """What the control slice's agent would tell a module that is loaded now."""
        kept, slices = {}, {}
        for effect in self.done:
            if isinstance(effect, Answer) and "keep" in effect.value:
                kept.update(effect.value["keep"])
                slices.update((one["number"], one) for one in kept.pop("slices"))
                for number in effect.value.get("gone", ()):
                    slices.pop(number, None)
        return {**kept, "slices": [*slices.values()]}

    def watched(self):
        return [effect.number for effect in self.done if isinstance(effect, Watch)]
