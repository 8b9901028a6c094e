"""Front ends: models of other libraries, trained with the same Plan and Worker."""
