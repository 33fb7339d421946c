"""Weight-only quantization: each linear's weight becomes integers with scales.

The pattern that OpenVINO's ONNX frontend keeps compressed, in the IR's file and at run time (FullyConnected with i8/i4/u4
weights, Gather with i8 for a tied embedding); checked on 2026.4.1:

    q [out, in] INT8,  scale FP32 [out]            -> DequantizeLinear(axis=0)                  -> w [out, in]
    q [out, in] INT4,  scale FP32 [out, in/G]      -> DequantizeLinear(axis=1, block_size=G)    -> w [out, in]
    q [out, in] UINT4, scale FP32, zero_point UINT4 [out, in/G] -> the same with three inputs   -> w [out, in]
    w -> Transpose(perm=[1, 0]) -> MatMul(x, .);   a tied embedding: w -> Gather(axis=0), the same w for both

(opset 21; 4-bit initializers packed two to a byte, low half first). [in, out] weights work too but cost transposes at load.
Under int4 weights the output head (and a tied embedding with it) keeps eight bits per channel: it decides the token.
"""
