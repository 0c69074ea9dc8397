"""The training loop, and what a run consists of.

loop            steps, validations and checkpoints: `Trainer`
plan            what a run consists of, and its graphs
order           the windows of each step
passes          the graphs of a run: the loss with its gradients, and the loss alone
losses          the objective over windows, by these graphs
gradient        the gradient of a step, as the sum of its batches'
learning_rate   the learning rate of each step
experts         how evenly a mixture's experts are loaded
validation      what a validation reads, and how sure it is
divergence      which window and which node made a number that is not finite
best            the parameters that validated best
reports         what a run tells as it goes, and its history
checkpoint      a run's whole state as one file
folder          the checkpoints of a run in their folder
identity        what makes a run what it is
arithmetic      compute type, vector unit and compiler, which a resumed run must match
lock            one writer at a time
checks          what holds when a run begins
caps            settings that do less than they say, and why
fit             a limit of memory → the settings that stay below it
memory          what a run takes of the host and of each device
"""
