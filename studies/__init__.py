"""The paper's claims as experiments that anyone can run."""
