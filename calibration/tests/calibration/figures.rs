//! The published figures, as kernels and seconds.

use narrows_calibration::measurements::{MeasuredQuantity, priced_kernels, shipped};
use narrows_cost_model::Prices;
use narrows_cost_model::profile::preset;
use narrows_plan::{DType, Kernel};

/// A measured time of kernels that ran one after the other.
pub struct Figure {
    pub name: String,
    /// Kernels, with the number of times that each ran.
    pub kernels: Vec<(Kernel, f64)>,
    pub seconds: f64,
}

impl Figure {
    /// The predicted time, in seconds.
    pub fn price(&self, prices: &Prices) -> f64 {
        self.kernels.iter().map(|(kernel, times)| prices.kernel_time(kernel).0 * times).sum()
    }

    /// price / measured − 1.
    pub fn error(&self, prices: &Prices) -> f64 {
        self.price(prices) / self.seconds - 1.0
    }
}

/// The figures by table.
pub struct Figures {
    pub products: Vec<Figure>,
    pub utilisation: Vec<Figure>,
    pub grouped_products: Vec<Figure>,
    pub all_reduces: Vec<Figure>,
    pub grouped_all_reduces: Vec<Figure>,
}

pub fn load() -> Figures {
    Figures {
        products: table("products"),
        utilisation: table("utilisation"),
        grouped_products: table("grouped products"),
        all_reduces: table("all-reduces"),
        grouped_all_reduces: table("grouped all-reduces"),
    }
}

/// A table of the shipped measurements.
fn table(name: &str) -> Vec<Figure> {
    let profile = preset("a100-80gb").unwrap();
    let file = shipped().unwrap().remove(0);
    let rows = file.measurements.iter().filter(|row| row.table == name);
    let figures = rows.map(|row| {
        let MeasuredQuantity::Kernels(runs) = &row.measured else { panic!("{name} are kernels") };
        let (kernels, seconds) =
            (priced_kernels(runs, row.mesh, DType::Bf16), row.measured_s(&profile));
        Figure { name: row.name.clone(), kernels, seconds }
    });
    figures.collect()
}
