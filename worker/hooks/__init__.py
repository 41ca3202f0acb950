"""The hooks that torch calls: forward, backward, optimizer, GradScaler. They record; they decide nothing."""
