"""LoRA's products in bfloat16, joined with those of the matrices that they adapt.

A wide matrix is a factor in bfloat16 with further columns, so that LoRA's part is no product of its
own but some more steps along k. Of y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ and its gradients:

    X = [x | u₁ | u₂ …], uᵢ = x·(sᵢAᵢ)ᵀ   of all products of the same x
    y = X·[W | 0 … Bᵢ … 0]ᵀ
    D = [dy | v], v = dy·(sB)
    dx = D·[W ; A]      dA = vᵀ·x      dB = dyᵀ·u
"""
