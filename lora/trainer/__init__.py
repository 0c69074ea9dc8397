"""The training loop, and what a run consists of.

loop            steps, validations and checkpoints: `Trainer`
passes          the graphs of a run: the loss with its gradients, and the loss alone
gradient        the gradient of a step, as the sum of its batches'
learning_rate   the learning rate of each step
reports         what a run tells as it goes, and its history
checkpoint      a run's whole state as one file
arithmetic      compute type, vector unit and compiler, which a resumed run must match
lock            one writer at a time
checks          what holds when a run begins
caps            settings that do less than they say, and why
fit             a limit of memory → the settings that stay below it
memory          what a run takes of each device
"""
