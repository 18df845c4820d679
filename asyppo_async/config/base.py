"""What every section of the settings is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
