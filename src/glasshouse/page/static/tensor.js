// Decoding of tensors from the server: a shape and base64 data.

/**
 * @param {string} text
 * @returns {Uint8Array<ArrayBuffer>}
 */
function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // browsers since 2025
  const raw = atob(text);
  const made = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) made[i] = raw.charCodeAt(i);
  return made;
}

/**
 * Return {shape, data}: `data` is a Float32Array or Uint8Array in row-major order.
 * @param {PackedTensor | Tensor} packed
 * @returns {Tensor}
 */
export function decodeTensor(packed) {
  if ("data" in packed) return packed;
  const data = "u8" in packed ? bytes(packed.u8) : new Float32Array(bytes(packed.f32).buffer);
  return { shape: packed.shape, data: /** @type {Float32Array} */ (data) };
}

/**
 * Return row `index` of a tensor of two axes, without a copy.
 * @param {Tensor} tensor
 * @param {number} index
 * @returns {Tensor["data"]}
 */
export function row(tensor, index) {
  const width = tensor.shape[tensor.shape.length - 1];
  return tensor.data.subarray(index * width, (index + 1) * width);
}
