"""What a teacher says of the tokens that a student learns.

distributions   probabilities of k tokens and of all others together, at some positions
model           a model that says them as training goes
file            what one said beforehand, read where it is mapped
teach           a teacher reads a text once, and writes that file
"""

from pyggml.lora.teacher.distributions import Distributions, Teacher
from pyggml.lora.teacher.file import TeacherFile
from pyggml.lora.teacher.model import TeacherModel
from pyggml.lora.teacher.teach import Teaching

__all__ = ["Distributions", "Teacher", "TeacherFile", "TeacherModel", "Teaching"]
