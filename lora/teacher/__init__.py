"""What a teacher says of the tokens that a student learns.

distributions   probabilities of k tokens and of all others together, at some positions
model           a model that says them as training goes
vocabulary      whether two models have the same tokens
"""

from pyggml.lora.teacher.distributions import Distributions, Teacher
from pyggml.lora.teacher.model import TeacherModel

__all__ = ["Distributions", "Teacher", "TeacherModel"]
