"""For all tests: no network, whatever a test asks for."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
