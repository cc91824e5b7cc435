"""Canaries: examples of one's own, each in a training run or out of it by a fair coin.

Whoever can tell from what a run releases which canaries were in it has learned something about
single examples. How many guesses are right gives a lower bound on epsilon, to hold beside the
plan's upper bound (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run").

```python
planted = dp.audit.canaries.plant_gradients((xs, ys), 2_000, norm=1.0, seed=coins)
step = dp.make_step(
    planted.loss(loss), optax.sgd(0.5), plan, num_examples=planted.num_examples, seed=seed,
    l2_clip_norm=1.0,
)
state = dp.Trainer(step, planted.data).run(planted.model(model))
audit = planted.audit(planted.scores(state.model), plan, attack="gradient")
print(audit)  # a table
assert not audit.exceeds_plan
```

There are two kinds, and a run can have both:

| made by | a canary is | attacked is | the bound says |
|---|---|---|---|
| [`plant`][] | an example | its loss in the trained model | what such examples give away |
| [`plant_gradients`][] | the gradient of a parameter of its own | that parameter | whether \
sampling, clipping and noise are those of the plan |

A run can have both kinds. The first speaks of an attacker who sees the losses of the trained model
alone; its bound is usually far below the plan's epsilon. The second is the worst case that the
plan's epsilon is about, and so it finds faults. Any other scores of canaries, such as those of a
user's own attack, are audited in the same way.

**A canary that is out** still has its place in the data set, and its loss is the constant 0 there,
so that it adds exactly zero. So the number of examples, the expected batch size, and the samples do
not depend on the coins. With or without a canary, two data sets differ in one example that is
added, removed or zeroed out; the plan's epsilon holds for that under each of its relations.
"""

from .bounds import GUESSES, CanaryAudit, CanaryBound
from .planted import (
    Canaries,
    ExampleCanaries,
    GradientCanaries,
    Marked,
    plant,
    plant_gradients,
)

__all__ = [
    "GUESSES",
    "Canaries",
    "CanaryAudit",
    "CanaryBound",
    "ExampleCanaries",
    "GradientCanaries",
    "Marked",
    "plant",
    "plant_gradients",
]
