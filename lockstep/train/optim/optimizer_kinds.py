"""torch's optimizers by what each of their steps treats separately."""

from torch import optim

# Treat every element separately. Exact types: a subclass may do anything.
ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.ASGD,
        optim.Rprop,
    }
)

# Accept sparse gradients, if without momentum and decay; the last accepts no others.
LAZY = frozenset({optim.SGD, optim.Adagrad, optim.SparseAdam})

# Treat every parameter separately.
PARAMETERWISE = frozenset({optim.Adafactor, optim.Muon})
