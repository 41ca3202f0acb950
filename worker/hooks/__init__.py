"""The hooks that torch calls: forward, backward, optimizer, GradScaler. They only record."""
