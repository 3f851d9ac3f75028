from vaerdict.annotation.options import AnnotateOptions as AnnotateOptions
from vaerdict.annotation.pipeline import annotate as annotate
from vaerdict.annotation.result import Annotation as Annotation

__all__: list[str]
