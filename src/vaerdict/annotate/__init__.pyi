from vaerdict.annotate.options import AnnotateOptions as AnnotateOptions
from vaerdict.annotate.pipeline import annotate as annotate
from vaerdict.annotate.result import Annotation as Annotation

__all__: list[str]
