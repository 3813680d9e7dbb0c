import sys
from pathlib import Path


# For `transformers_tests`, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))

TRANSFORMERS_MARKS = (
    "accelerate_tests",
    "all_flash_attn_test",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "generate",
    "is_training_test",
    "slow",
    "torch_compile_test",
    "torch_export_test",
)


def pytest_configure(config):
    for mark in TRANSFORMERS_MARKS:
        config.addinivalue_line("markers", f"{mark}: a kind of test in Transformers' suite")
